"""A byte language model over any mixers: parallel for training, streaming for generation, with equal results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import MixerError
from ..functional.layout.checks import check_key_mask
from ..mixers import State
from ..mixers.attention import AttentionState
from ..mixers.base import chunk_positions, register_state, token_positions
from ..positions.samplers import check_sampler, sample_positions
from ..system.config import Json
from ..system.properties import named_errors
from ..types import Options, Spec
from .blocks import cycle_specs, evaluation_mode
from .decoder import Decoder, Weights, serves
from .layers import MLPKind, NormType
from .looped import LoopConfig, check_loop
from .sampling import FiniteSteps, check_sampling, pick_token, seeded_generator
from .speculative import Choices, Drafter, ModelDrafter, NgramDrafter, Speculation
from .trunk import Trunk, check_trunk

PAYS = 64  # new tokens from which a decoder is worth its making


@dataclass(frozen=True)
class LMConfig(Json):
    """A language model as JSON.

    Args:
        dim: features per token, at least 1.
        max_len: longest sequence in tokens, at least 1, if anything in the model has a length.
        mixers: one spec per layer, or a shorter list repeated cyclically over ``layers``.
        layers: number of blocks; None: one per spec.
        vocab: number of tokens in the vocabulary, at least 1; default 256, all bytes.
        mlp_ratio: hidden width of the MLPs as a multiple of ``dim``; 0: there are none, as in Mamba-2.
        norm: "pre" (with a final norm before the head) or "post".
        norm_type: "layer" for LayerNorm, "rms" for RMSNorm, both with eps 1e-5.
        mlp: "gelu", "relu2" or "swiglu"; see ``MLP``.
        mlp_bias: whether its layers have biases.
        positions: what is added to the embedding: "learned" vectors, fixed "sinusoidal" ones, learned "smooth" ones,
            "abacus" or "coupled" ones of digits (``positions.ADDED_POSITIONS``), an object of such a name and options,
            or None.
        sample_positions: other positions in training, such as ``{"name": "offset", "longest": 512}``, for what is added
            to the embedding and for the mixers; see ``positions.SAMPLERS``. ``{"name": "cape", "global_shift": 50,
            "local_shift": 0.5, "scale": 1.03}`` jitters sinusoids alone. None: the tokens' own.
        loop: how often the blocks are applied with the same weights, and whether the embedded input is added in again;
            see ``LoopConfig``. None: once.
        logit_cap: the head's logits l become cap * tanh(l / cap), so that none exceeds it (Gemma 2, arXiv 2408.00118);
            None: as they are.
        tied: whether the head shares the embedding's weight.
        dropout: dropout rate in [0, 1), of the embedded tokens and each branch.
        init_std: standard deviation of the initial embeddings, weights of MLPs and q_proj, k_proj, v_proj and out_proj
            of the mixers; those that write to the residual stream are divided by sqrt(2 layers). The documentation of
            each mixer describes its other parameters.
    """

    dim: int
    max_len: int
    mixers: tuple[Spec, ...]
    layers: int | None = None
    vocab: int = 256
    mlp_ratio: float = 4.0
    norm: str = "pre"
    norm_type: NormType = "layer"
    mlp: MLPKind = "gelu"
    mlp_bias: bool = True
    positions: str | Options | None = "learned"
    sample_positions: Options | None = None
    loop: LoopConfig | None = None
    logit_cap: float | None = None
    tied: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    kind: ClassVar[str] = "lm"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixers", tuple(self.mixers))
        check_trunk(self, "dim", "max_len", "vocab")
        check_loop(self.loop, "LMConfig")
        check_sampler(self.sample_positions, self.max_len, self.positions, "LMConfig")

    def specs(self) -> list[Spec]:
        """Return one mixer spec per layer."""
        return cycle_specs(self.mixers, self.layers)


@register_state
class LMState(NamedTuple):
    """The state of a partly read text.

    Attributes:
        layers: the mixers' states, one for each application of a block.
        position: next position of each row (B,).
        run: with positions of digits, the length (B,) of the number that each row ends in; otherwise nothing.
    """

    layers: tuple[State, ...]
    position: Tensor
    run: tuple[Tensor, ...] = ()


@named_errors
class LM(Trunk):
    """Embedding, blocks, norm, head. Causal: the logits at t depend on tokens 0..t.

    Args:
        config: an ``LMConfig``.
    """

    config_class = LMConfig
    pipeline_tags = None, "text-generation"

    reads_shares = True

    def __init__(self, config: LMConfig):
        super().__init__(config, vocab=config.vocab, loop=config.loop)
        self.config = config

    def forward(self, tokens: Tensor, *, key_mask: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """Map integer tokens (B, T) to logits (B, T, vocab).

        Args:
            key_mask: (B, T) bool, False where a token is padding (left or right). Logits at padding are meaningless.
            starts: (B, T) bool, True where a text begins, for rows that hold several; each sees itself only, and its
                positions count from 0.
        """
        self._check_tokens(tokens)
        check_key_mask("LM", key_mask, tokens)
        at = token_positions(tokens, key_mask)
        given: dict[str, Tensor | None] = {"key_mask": key_mask}
        if starts is not None:
            if self.config.sample_positions is not None or self._reads_tokens:
                raise MixerError(
                    "LM: sampled positions and those of digits are for one text in each row; leave starts out."
                )
            at, ends = self.packed_positions(tokens, starts, key_mask)
            given = {"cu_seqlens": ends}
        elif self.training and self.config.sample_positions is not None:
            at = sample_positions(self.config.sample_positions, at, "LM")
            if not at.is_floating_point():  # mixers count tokens
                given["positions"] = at
        x, _ = self.embed_run(tokens, at, key_mask, ())
        return self.read(x, **given)

    def resize(self, max_len: int) -> LM:
        """Stretch everything that has a length to ``max_len`` tokens, in place, and return the model.

        The table of learned positions and the mixers' parameters per position are interpolated linearly, so that
        position i moves to i * new / old. What has no length stays as it is. What is stretched becomes a new parameter:
        build optimisers afterwards.

        Raises:
            MixerError: for a length below 1, and for a mixer that cannot be stretched; then nothing has changed.
        """
        if not isinstance(max_len, int) or isinstance(max_len, bool) or max_len < 1:
            raise MixerError(f"LM.resize: max_len must be a positive integer, got {max_len!r}.")
        mixers = tuple(
            _of_length({**spec, **block.mixer.options_of_length()}, max_len)
            for spec, block in zip(self.config.mixers, self.blocks, strict=False)  # further blocks repeat the specs
        )
        positions = self.config.positions
        if isinstance(positions, dict) and positions["name"] == "learned":
            positions = _of_length(positions, max_len)
        config = replace(self.config, max_len=max_len, mixers=mixers, positions=positions)
        bound = [block.mixer for block in self.blocks if block.mixer.max_len is not None]
        for mixer in bound:
            if getattr(mixer, "resize", None) is None:
                raise MixerError(
                    f"LM.resize: {type(mixer).__name__} has parameters per position that cannot be stretched; build "
                    + f"the model for {max_len} tokens."
                )
        if self.longest_added() is not None:
            self.positions.resize(max_len)
        for mixer in bound:
            mixer.resize(max_len)
        self.config = config
        return self

    def init_state(self, batch_size: int, *, device: torch.device | None = None) -> LMState:
        """Return the state before the first token.

        Args:
            device: where the tokens will be, if hooks fetch the weights; None: where the weights are.
        """
        layers, position = self.empty_states(batch_size, device)
        return LMState(layers, position, (torch.zeros_like(position),) if self._reads_tokens else ())

    def extend(
        self, tokens: Tensor, state: LMState, *, key_mask: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, LMState]:
        """Map the next L >= 1 tokens (B, L) to their logits (B, L, vocab) and the new state.

        The logits equal those of ``forward`` on everything so far.

        Args:
            key_mask: (B, L) bool, False where a token is padding. Padding before the first token of a row takes no
                position, later padding does.
            positions: (B, L), in place of those that follow the state's; the next token of a row follows its last one.
        """
        self._check_tokens(tokens)
        check_key_mask("LM", key_mask, tokens)
        rows = state.position.shape[0]  # len() would fix the number of rows in an exported program
        if not torch.compiler.is_compiling() and (len(tokens) != rows or tokens.shape[1] < 1):
            raise MixerError(
                f"LM: for this state, extend needs tokens of shape ({rows}, 1 or more), got {tuple(tokens.shape)}."
            )
        at, after = chunk_positions(state.position, tokens, positions, key_mask)
        longest = self.longest_added()
        if longest is not None and not torch.compiler.is_compiling() and rows and int(after.max()) > longest:
            raise MixerError(
                f"LM: the model was built with max_len={longest}, but this chunk would end at length "
                + f"{int(after.max())}; give a shorter one."
            )
        x, run = self.embed_run(tokens, at, key_mask, state.run)
        logits, layers = self.read_chunk(x, state.layers, key_mask=key_mask, positions=positions)
        return logits, LMState(layers, after, run)

    def decoder(self, batch_size: int = 1, *, max_len: int | None = None, weights: Weights | None = None) -> Decoder:
        """Return a ``Decoder`` of this model, whose ``extend`` is faster for one token per row on the CPU."""
        return Decoder(self, batch_size, max_len=max_len, weights=weights)

    @property
    def _reads_tokens(self) -> bool:
        return getattr(self.positions, "reads_tokens", False)

    def embed_run(
        self, tokens: Tensor, at: Tensor, key_mask: Tensor | None, run: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the embedded tokens (B, T, D) with their positions added, and the state's ``run`` after them."""
        if not self._reads_tokens:
            return self.embed_at(tokens, at), run
        x = self.embed(tokens.long())
        before = run[0] if run else tokens.new_zeros(tokens.shape[0], dtype=torch.long)
        added, after = self.positions(tokens, key_mask, before)
        return x + added.to(x.dtype), (after,)

    def _check_tokens(self, tokens: Tensor) -> None:
        self.check_symbols(tokens)
        if self.max_len is not None and tokens.shape[1] > self.max_len:
            raise MixerError(
                f"LM: the model was built with max_len={self.max_len}, got {tokens.shape[1]} tokens; "
                + "shorten them, or build with a larger max_len."
            )

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        n: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        key_mask: Tensor | None = None,
        state: LMState | None = None,
        decoder: Any = "auto",
        draft: Literal["ngram"] | LM | Drafter | None = None,
    ) -> Tensor:
        """Continue each row of the prompt tokens (B, T) by n tokens. Returns (B, T + n).

        The state of the mixers streams; with a mixer that has no streaming form, all tokens so far are read again for
        each new one.

        Args:
            temperature: divides the logits; 0 takes the most likely token.
            top_k: keep only the k most likely tokens; None: all.
            top_p: then keep only the fewest tokens that together have probability p; None: all.
            seed: makes the choice repeatable; None: torch's generator is used.
            key_mask: (B, T) bool for prompts of different lengths, padded on the left.
            state: what was read before the prompt, by ``prefill`` or ``extend``. It stays as it is, so that several
                prompts can go on from it. None: nothing.
            decoder: a ``Decoder`` or an ``export.GraphedDecoder`` of this model, which computes the steps after the
                prompt; "auto": a ``Decoder`` if it serves this model and pays for as many tokens; None: ``extend``.
            draft: guesses tokens, several of which one call of ``extend`` checks: "ngram", what followed the last
                tokens earlier (``NgramDrafter``), a smaller ``LM`` (``ModelDrafter``), or a drafter, whose ``counts``
                say how many were right. The text, a sampled one too, is that without guesses, but for rounding where
                two tokens are almost equally good.

        Raises:
            MixerError: before the first step, if prompt and continuation together are longer than ``max_len``; if the
                logits of a step are NaN or infinite; for ``state`` or ``draft`` with a mixer that does not stream.
        """
        check_sampling(temperature, top_k, top_p)
        given = decoder is not None and decoder != "auto"
        if given and getattr(decoder, "model", None) is not self:
            raise MixerError("LM.generate: the decoder belongs to another model; make one from this model.")
        drafter = None if draft is None else _drafter_of(draft)
        self._check_prompt(tokens, n, key_mask, state)
        for name, each in (("state", state), ("draft", draft)):
            if each is not None and not self.streams:
                raise MixerError(f"LM.generate: {name} needs mixers that continue from a state; leave it out.")
        if drafter is not None and getattr(decoder, "weights", None) is not None:
            rounds = f"this decoder rounds weights to {decoder.weights}, and guesses are checked with the model's own"
            raise MixerError(f"LM.generate: {rounds}; make it without weights=, or leave draft out.")
        sampling: Any = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        generator = seeded_generator(seed, tokens.device)
        out, steps = [tokens], FiniteSteps("LM.generate", "logits of new token {step}")
        with evaluation_mode(self):
            logits, after, extend = self._begin(tokens, n, key_mask, state, decoder, drafter)
            if drafter is not None:
                valid = torch.ones_like(tokens, dtype=torch.bool) if key_mask is None else key_mask
                texts = [row[each].tolist() for row, each in zip(tokens, valid, strict=True)]
                drafter.begin(self, len(tokens))
                guessing = Speculation(self, extend, drafter, Choices(generator, **sampling), texts, after, n)
                return torch.cat((tokens, guessing.write(logits[:, -1]).to(tokens.dtype)), 1)
            for i in range(n):
                token = pick_token(steps.logits(logits[:, -1]), generator=generator, **sampling)
                out.append(token.to(tokens.dtype))
                if i + 1 == n:
                    break
                if after is None:
                    logits = self._reread(torch.cat(out, 1), key_mask)
                else:
                    logits, after = extend(token, after)
        steps.finish()
        return torch.cat(out, 1)

    def _begin(
        self,
        tokens: Tensor,
        n: int,
        key_mask: Tensor | None,
        state: LMState | None,
        decoder: Any,
        drafter: Drafter | None,
    ) -> tuple[Tensor, LMState | None, Any]:
        """Read the prompt; return its logits, the state after it, if there is one, and what reads the next token."""
        if not self.streams:
            return self._reread(tokens, key_mask), None, None
        if state is None:
            logits, state = self.prefill(tokens, key_mask=key_mask)
        else:
            seen = None if key_mask is None else key_mask.cumsum(1) > 0  # padding on the left takes no positions
            at = None if seen is None else state.position[:, None] + (seen.cumsum(1) - 1).clamp_min(0)
            logits, state = self.extend(tokens, state, key_mask=key_mask, positions=at)
        if decoder != "auto":
            return logits, state, self.extend if decoder is None else decoder.extend
        one = drafter is None or len(tokens) == 1  # chunks of several rows keep masked tokens, which need memory too
        if n < PAYS or not len(tokens) or not one or not serves(self):
            return logits, state, self.extend
        return logits, state, self.decoder(len(tokens), max_len=_kept_tokens(state) + n).extend

    def _reread(self, tokens: Tensor, key_mask: Tensor | None) -> Tensor:
        """Compute the logits of a prompt and what follows it, without a state."""
        if key_mask is not None:
            new = key_mask.new_ones(len(tokens), tokens.shape[1] - key_mask.shape[1])
            tokens, key_mask = _without_shared_padding(tokens, torch.cat((key_mask, new), 1))
        return self(tokens, key_mask=key_mask)

    def prefill(self, tokens: Tensor, *, key_mask: Tensor | None = None) -> tuple[Tensor, LMState]:
        """Read a prompt (B, T) into a fresh state; return the logits of its last chunk and the state.

        Padding that all rows share is skipped.
        """
        state = self.init_state(tokens.shape[0], device=tokens.device)
        if key_mask is not None:
            tokens, key_mask = _without_shared_padding(tokens, key_mask)
        return self.extend(tokens, state, key_mask=key_mask)

    def _check_prompt(self, tokens: Tensor, n: int, key_mask: Tensor | None, state: LMState | None) -> None:
        if not isinstance(n, int) or n < 0 or tokens.ndim != 2 or tokens.shape[1] < 1:
            raise MixerError(
                "LM.generate: needs a prompt (batch, time >= 1) and an integer n >= 0, got tokens "
                + f"{tuple(tokens.shape)} and n={n}."
            )
        length = tokens.shape[1]
        if key_mask is not None:
            check_key_mask("LM.generate", key_mask, tokens)
            if not bool(key_mask[:, -1].all()):
                raise MixerError("LM.generate: every row of the prompt must end in a valid token; pad on the left.")
            length -= _shared_padding(key_mask)
        if state is not None and len(state.position):
            length += int(state.position.max())
        if self.max_len is not None and length + n > self.max_len:
            most = max(self.max_len - length, 0)
            raise MixerError(
                f"LM.generate: a prompt of {length} tokens and n={n} exceed max_len={self.max_len}; "
                + f"n can be at most {most}."
            )


def _drafter_of(draft: Any) -> Drafter:
    """Return the drafter that ``draft=`` of ``LM.generate`` stands for."""
    if isinstance(draft, Drafter):
        return draft
    if isinstance(draft, LM):
        return ModelDrafter(draft)
    if isinstance(draft, str) and draft == "ngram":
        return NgramDrafter()
    raise MixerError(f"LM.generate: draft={draft!r} is unknown; give 'ngram', an LM, a Drafter or None.")


def _kept_tokens(state: LMState) -> int:
    """Count the tokens whose keys and values the layers of softmax attention keep."""
    return max((layer.valid.shape[1] for layer in state.layers if isinstance(layer, AttentionState)), default=0)


def _of_length(spec: Spec, max_len: int) -> Spec:
    """Return a spec whose own ``max_len``, if it gives one, is another."""
    return {**spec, "max_len": max_len} if "max_len" in spec else spec


def _shared_padding(key_mask: Tensor) -> int:
    """Count the leading columns that are padding in every row."""
    return int((~key_mask.any(0)).long().cumprod(0).sum())


def _without_shared_padding(tokens: Tensor, key_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the leading columns that are padding in every row."""
    shared = _shared_padding(key_mask)
    return tokens[:, shared:], key_mask[:, shared:]
