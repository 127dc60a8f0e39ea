"""An encoder and a decoder over any mixers, for translation, summarisation and answers.

The decoder streams: its states, and what the cross mixers keep of the source, are all that generation needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.layout.checks import check_key_mask
from ..mixers import State
from ..mixers.base import chunk_positions, register_state, token_positions
from ..mixers.state import reorder
from ..positions.added import build_added_positions
from ..system.config import Json
from ..system.properties import named_errors
from ..types import Spec
from .beam import BeamSearch, Writer, check_beam
from .blocks import cycle_specs, evaluation_mode
from .encoder import check_plain_positions
from .layers import MLPKind, NormType, build_norm
from .sampling import FiniteSteps, check_sampling, pick_token, seeded_generator
from .trunk import Trunk, build_blocks, check_trunk, shortest

ATTENTION: tuple[Spec, ...] = ({"name": "attention", "heads": 4},)


@dataclass(frozen=True)
class Seq2SeqConfig(Json):
    """An encoder and a decoder as JSON, with one vocabulary for both. The fields not listed are those of ``LMConfig``.

    Args:
        max_len: longest source and longest target in tokens.
        mixers: mixers of the decoder over the target; one spec per layer, or fewer to be repeated. They are causal.
        encoder_mixers: mixers of the encoder over the source, which see both sides; None: ``mixers``.
        cross_mixers: mixers of the decoder over what the encoder says of the source; default: softmax attention with 4
            heads. `tokenmix list` says which take a context.
        layers: blocks of the decoder; None: one per spec.
        encoder_layers: blocks of the encoder; None: as many as the decoder has.
        embed_scale: factor of the embedded tokens, before positions are added. Vaswani et al. 2017 take sqrt(dim).
        tied: whether the head shares the embedding's weight, which encoder and decoder share in any case.
        start: token that every target begins with.
        end: token that ends a target.
    """

    dim: int
    max_len: int
    mixers: tuple[Spec, ...]
    encoder_mixers: tuple[Spec, ...] | None = None
    cross_mixers: tuple[Spec, ...] = ATTENTION
    layers: int | None = None
    encoder_layers: int | None = None
    vocab: int = 256
    mlp_ratio: float = 4.0
    norm: str = "pre"
    norm_type: NormType = "layer"
    mlp: MLPKind = "gelu"
    mlp_bias: bool = True
    positions: str | None = "sinusoidal"
    embed_scale: float = 1.0
    tied: bool = True
    dropout: float = 0.0
    init_std: float = 0.02
    start: int = 1
    end: int = 2
    kind: ClassVar[str] = "seq2seq"
    logit_cap: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        for name in ("mixers", "encoder_mixers", "cross_mixers"):
            specs = getattr(self, name)
            object.__setattr__(self, name, specs if specs is None else tuple(specs))
        check_trunk(self, "dim", "max_len", "vocab")
        check_plain_positions(self.positions, "Seq2SeqConfig")
        for name, count in (("encoder_mixers", self.encoder_layers or self.layers), ("cross_mixers", self.layers)):
            specs = getattr(self, name)
            if specs is not None and not specs:
                raise MixerError(f"Seq2SeqConfig: {name} is empty; give at least one spec.")
            if specs is not None and len(specs) > (count or len(self.mixers)):
                raise MixerError(
                    f"Seq2SeqConfig: {name} holds {len(specs)} specs for {count or len(self.mixers)} layers; give one "
                    + "for each layer, or fewer, which repeat."
                )
        if self.encoder_layers is not None and self.encoder_layers < 1:
            raise MixerError(f"Seq2SeqConfig: encoder_layers must be positive, got {self.encoder_layers}.")
        if not self.embed_scale > 0:
            raise MixerError(f"Seq2SeqConfig: embed_scale must be positive, got {self.embed_scale}.")
        if not 0 <= self.start < self.vocab or not 0 <= self.end < self.vocab or self.start == self.end:
            raise MixerError(
                f"Seq2SeqConfig: start and end must be two different tokens in 0..{self.vocab - 1}, got {self.start} "
                + f"and {self.end}."
            )

    def specs(self) -> list[Spec]:
        """Return one spec per layer of the decoder, for its own mixer."""
        return cycle_specs(self.mixers, self.layers)

    def cross_specs(self) -> list[Spec]:
        """Return one spec per layer of the decoder, for the mixer over the source."""
        return cycle_specs(self.cross_mixers, self.layers or len(self.mixers))

    def encoder_specs(self) -> list[Spec]:
        """Return one spec per layer of the encoder."""
        return cycle_specs(self.encoder_mixers or self.mixers, self.encoder_layers or self.layers or len(self.mixers))


@register_state
class Seq2SeqState(NamedTuple):
    """The state of a partly written target.

    Attributes:
        layers: the states of the decoder's blocks, which hold what was read of the source.
        position: next position of each row (B,).
    """

    layers: tuple[State, ...]
    position: Tensor


class Reader(nn.Module):
    """The encoder: positions, blocks that see both sides, and a norm, over tokens that are embedded already."""

    def __init__(self, config: Seq2SeqConfig):
        super().__init__()
        self.init_std = config.init_std
        self.positions: Any = build_added_positions(config.positions, config.dim, config.max_len, "Seq2SeqConfig")
        self.blocks: Any = build_blocks(config, config.encoder_specs(), causal=False)
        self.norm = build_norm(config.norm_type, config.dim, 1e-5) if config.norm == "pre" else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def reset_parameters(self) -> None:
        """Re-initialise every parameter from torch's generator."""
        if hasattr(self.positions, "reset_parameters"):
            self.positions.reset_parameters()
        for block in self.blocks:
            block.reset_parameters(self.init_std, self.init_std / (2 * len(self.blocks)) ** 0.5)
        if not isinstance(self.norm, nn.Identity):
            self.norm.reset_parameters()

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Map embedded tokens (B, S, D) to features (B, S, D)."""
        if self.positions is not None:
            x = x + self.positions(token_positions(x, key_mask)).to(x.dtype)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, key_mask=key_mask)
        return self.norm(x)


class Streamed:
    """Targets that are continued from the states of the decoder."""

    def __init__(self, model: Seq2Seq, source: Tensor, source_mask: Tensor | None):
        self.model, self.state = model, model.init_state(source, source_mask)

    def next(self, token: Tensor) -> Tensor:
        """Add one token (rows, 1) to each target and return the logits (rows, vocab) of what follows."""
        logits, self.state = self.model.extend(token, self.state)
        return logits[:, -1]

    def reorder(self, index: Tensor) -> None:
        """Go on with the targets of these rows (rows,), with repetition."""
        self.state = reorder(self.state, index)


class Reread:
    """Targets that are read again for each new token, by a decoder that does not stream."""

    def __init__(self, model: Seq2Seq, source: Tensor, source_mask: Tensor | None):
        self.model, self.context, self.mask = model, model.encode(source, source_mask), source_mask
        self.target = source.new_empty(len(source), 0)

    def next(self, token: Tensor) -> Tensor:
        """Add one token (rows, 1) to each target and return the logits (rows, vocab) of what follows."""
        self.target = torch.cat([self.target, token.to(self.target.dtype)], 1)
        return self.model.read_target(self.target, self.context, self.mask)[:, -1]

    def reorder(self, index: Tensor) -> None:
        """Go on with the targets of these rows (rows,), with repetition."""
        self.target, self.context = self.target[index], self.context[index]
        self.mask = None if self.mask is None else self.mask[index]


@named_errors
class Seq2Seq(Trunk):
    """An encoder over a source, and a causal decoder that reads it through a cross mixer in each of its blocks.

    Args:
        config: a ``Seq2SeqConfig``.
    """

    config_class = Seq2SeqConfig
    pipeline_tags = None, "text2text-generation"

    def __init__(self, config: Seq2SeqConfig):
        super().__init__(config, vocab=config.vocab, cross=config.cross_specs())
        self.config = config
        with torch.random.fork_rng():
            self.encoder = Reader(config)
        self.encoder.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialise every parameter from torch's generator."""
        super().reset_parameters()
        if hasattr(self, "encoder"):
            self.encoder.reset_parameters()

    @property
    def max_source(self) -> int | None:
        """Return the longest source this model accepts; None if nothing that reads it has a length."""
        own = [block.mixer.max_len for block in self.encoder.blocks]
        across = [block.cross.max_context_len for block in self.blocks]
        return shortest(*own, *across, getattr(self.encoder.positions, "max_len", None))

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
    ) -> Tensor:
        """Map source (B, S) and target (B, T), both integers, to logits (B, T, vocab) of the tokens after each target.

        Args:
            source_mask: (B, S) bool, False where a token of the source is padding.
            target_mask: (B, T) bool, False where a token of the target is padding; its logits are meaningless.
        """
        if len(target) != len(source):
            raise MixerError(f"Seq2Seq: got {len(source)} sources and {len(target)} targets; they must be as many.")
        return self.read_target(target, self.encode(source, source_mask), source_mask, target_mask)

    def read_target(
        self, target: Tensor, context: Tensor, context_mask: Tensor | None = None, target_mask: Tensor | None = None
    ) -> Tensor:
        """Map a target (B, T) to logits (B, T, vocab), over the features (B, S, D) of a source that ``encode`` gave."""
        self._check(target, target_mask, "target", self.max_len)
        at = token_positions(target, target_mask)
        given: dict[str, Tensor | None] = {"key_mask": target_mask}
        if target_mask is not None:
            given["positions"] = at
        return self.read(self.embed_at(target, at), context=context, context_mask=context_mask, **given)

    def encode(self, source: Tensor, source_mask: Tensor | None = None) -> Tensor:
        """Map a source (B, S) to the features (B, S, D) that the decoder reads."""
        self._check(source, source_mask, "source", self.max_source)
        return self.encoder(self.embed(source.long()) * self.config.embed_scale, source_mask)

    def embed_at(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Return the embedded tokens (B, T, D) of a target at the positions ``at`` (B, T), added to them."""
        x = self.embed(tokens.long()) * self.config.embed_scale
        return x if self.positions is None else x + self.positions(at).to(x.dtype)

    def init_state(self, source: Tensor, source_mask: Tensor | None = None) -> Seq2SeqState:
        """Read a source (B, S) and return the state before the first token of the target.

        Raises:
            MixerError: if a mixer of the decoder has no streaming form, or one across keeps no context.
        """
        context = self.encode(source, source_mask)
        return Seq2SeqState(*self.empty_states(len(source), source.device, context=context, context_mask=source_mask))

    def extend(self, target: Tensor, state: Seq2SeqState) -> tuple[Tensor, Seq2SeqState]:
        """Map the next L >= 1 tokens (B, L) of the target to logits (B, L, vocab) and the new state.

        The logits equal those of ``forward`` on everything so far.
        """
        self._check(target, None, "target", self.max_len)
        rows = state.position.shape[0]
        if not torch.compiler.is_compiling() and (len(target) != rows or target.shape[1] < 1):
            raise MixerError(
                f"Seq2Seq: for this state, extend needs tokens of shape ({rows}, 1 or more), got {tuple(target.shape)}."
            )
        at, after = chunk_positions(state.position, target, None, None)
        logits, layers = self.read_chunk(self.embed_at(target, at), state.layers, positions=at)
        return logits, Seq2SeqState(layers, after)

    @torch.no_grad()
    def generate(
        self,
        source: Tensor,
        n: int,
        *,
        source_mask: Tensor | None = None,
        beams: int = 1,
        length_penalty: float = 1.0,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Write a target of at most n tokens for each source (B, S). Returns (B, at most n) tokens after ``start``.

        A target ends with ``end``, which also fills the row behind it. The states of the mixers stream; with a mixer
        that has no streaming form the target so far is read again for each new token.

        Args:
            source_mask: (B, S) bool, False where a token of the source is padding.
            beams: targets that are followed at once; the one with the highest sum of log-probabilities, divided by its
                length to the power of ``length_penalty``, is returned. 1: one target, chosen token by token.
            length_penalty: 0 prefers short targets, 1 takes the mean log-probability, more prefers long ones.
            temperature: divides the logits; 0 takes the most likely token. With beams it must be 0.
            top_k: keep only the k most likely tokens; None: all.
            top_p: then keep only the fewest tokens that together have probability p; None: all.
            seed: makes the choice repeatable; None: torch's generator is used.

        Raises:
            MixerError: if n tokens are more than the model's ``max_len``, for settings out of range, and if the logits
                of a step are NaN or infinite.
        """
        check_sampling(temperature, top_k, top_p)
        check_beam("Seq2Seq.generate", beams, length_penalty, temperature)
        if not isinstance(n, int) or n < 1 or (self.max_len is not None and n > self.max_len):
            most = "" if self.max_len is None else f" and at most max_len={self.max_len}"
            raise MixerError(f"Seq2Seq.generate: n must be an integer of at least 1{most}, got {n}.")
        with evaluation_mode(self):
            writer = self._writer(source, source_mask)
            if beams > 1:
                search = BeamSearch(beams, length_penalty, self.config.end)
                return search.write(writer, len(source), n, source.device, start=self.config.start)
            generator = seeded_generator(seed, source.device)
            return self._write(
                writer, source, n, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
            )

    def _write(self, writer: Writer, source: Tensor, n: int, **sampling: Any) -> Tensor:
        """Write row by row, one token at a time."""
        end = self.config.end
        done = torch.zeros(len(source), 1, dtype=torch.bool, device=source.device)
        token, out = torch.full_like(done, self.config.start, dtype=torch.long), []
        steps = FiniteSteps("Seq2Seq.generate", "logits of new token {step}")
        for _ in range(n):
            logits = steps.logits(writer.next(token).masked_fill(done, 0.0))
            token = pick_token(logits, **sampling).masked_fill(done, end)
            out.append(token)
            done = done | (token == end)
            if bool(done.all()):
                break
        steps.finish()
        return torch.cat(out, 1)

    def _writer(self, source: Tensor, source_mask: Tensor | None) -> Writer:
        return Streamed(self, source, source_mask) if self.streams else Reread(self, source, source_mask)

    def _check(self, tokens: Tensor, mask: Tensor | None, what: str, longest: int | None) -> None:
        self.check_symbols(tokens)
        check_key_mask(f"Seq2Seq, {what}", mask, tokens)
        if tokens.shape[1] < 1:
            raise MixerError(f"Seq2Seq: the {what} needs at least one token, got shape {tuple(tokens.shape)}.")
        if longest is not None and tokens.shape[1] > longest:
            raise MixerError(
                f"Seq2Seq: the model reads {what}s of up to {longest} tokens, got {tokens.shape[1]}; shorten them, or "
                + "build with a larger max_len."
            )
