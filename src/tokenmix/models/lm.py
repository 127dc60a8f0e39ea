"""A byte language model over any mixers: parallel for training, streaming for generation, the two equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MixerError
from ..mixers import State
from ..mixers.base import chunk_positions, register_state, token_positions
from ..system.config import Json
from .blocks import cycled, evaluating
from .sampling import check_sampling, pick_token
from .trunk import Trunk, check_trunk


@dataclass(frozen=True)
class LMConfig(Json):
    """A language model as JSON.

    Args:
        dim: features per token.
        max_len: longest sequence, where anything in the model has a length.
        mixers: one spec per layer, or a shorter list repeated cyclically over ``layers``.
        layers: number of blocks; default one per spec.
        norm: "pre" (a last norm before the head) or "post".
        positions: "learned" vectors added to the embedding, or None.
        tied: the head shares the embedding's weight.
        init_std: of embeddings, of the weights of MLPs and of the mixers' q_proj, k_proj, v_proj and out_proj; those that write to the residual stream
            are divided by sqrt(2 layers). What else a mixer has starts as its own page says.
    """

    dim: int
    max_len: int
    mixers: tuple[dict[str, Any], ...]
    layers: int | None = None
    vocab: int = 256
    mlp_ratio: float = 4.0
    norm: str = "pre"
    positions: str | None = "learned"
    tied: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    kind: str = "lm"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixers", tuple(self.mixers))
        check_trunk(self, "dim", "max_len", "vocab")

    def specs(self) -> list[dict[str, Any]]:
        """One mixer spec per layer."""
        return cycled(self.mixers, self.layers)


@register_state
class LMState(NamedTuple):
    """The mixers' states, one per layer, and the next position of each row (B,)."""

    layers: tuple[State, ...]
    position: Tensor


class LM(Trunk):
    """Embedding, blocks, norm, head. Causal: logits at t read tokens 0..t.

    Args:
        config: an ``LMConfig``.
    """

    def __init__(self, config: LMConfig):
        super().__init__(config, vocab=config.vocab)
        self.config = config

    @property
    def max_len(self) -> int | None:
        """The longest sequence this model takes; None where nothing in it has a length."""
        limits = [limit for limit in (self.mixers_max_len(), self.positions.max_len if self.positions else None) if limit is not None]
        return min(limits) if limits else None

    def forward(self, tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """tokens (B, T) integers -> logits (B, T, vocab).

        Args:
            key_mask: (B, T) bool, False where a token is padding (left or right). Logits at padding mean nothing.
        """
        self._check_tokens(tokens)
        return self.read(self.embed(tokens), token_positions(tokens, key_mask), key_mask=key_mask)

    def init_state(self, batch_size: int, *, device: torch.device | None = None) -> LMState:
        """The state before the first token, by default where the weights are; where the tokens will be, if hooks fetch the weights."""
        return LMState(*self.empty_states(batch_size, device))

    def extend(self, tokens: Tensor, state: LMState, *, key_mask: Tensor | None = None) -> tuple[Tensor, LMState]:
        """The next L >= 1 tokens (B, L) -> their logits (B, L, vocab), equal to ``forward`` on everything so far, and the new state."""
        self._check_tokens(tokens)
        at, after = chunk_positions(state.position, tokens, None, key_mask)
        if self.positions is not None and not torch.compiler.is_compiling() and int(after.max()) > self.positions.max_len:
            raise MixerError(f"LM: was built with max_len={self.positions.max_len}, this chunk would end at length {int(after.max())}; stop here.")
        logits, layers = self.read_chunk(self.embed(tokens), at, state.layers, key_mask=key_mask)
        return logits, LMState(layers, after)

    def _check_tokens(self, tokens: Tensor) -> None:
        self.check_symbols(tokens)
        if self.max_len is not None and tokens.shape[1] > self.max_len:
            raise MixerError(f"LM: was built with max_len={self.max_len}, got {tokens.shape[1]} tokens; cut them, or build with a larger max_len.")

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
        decoder: Any = None,
    ) -> Tensor:
        """Continue each row of the prompt tokens (B, T) by n tokens, streaming. Returns (B, T + n).

        Args:
            temperature: 0 takes the most likely token.
            top_k, top_p: keep the k most likely tokens, then the fewest that hold probability p.
            seed: makes the choice repeatable; default draws from torch's generator.
            key_mask: (B, T) bool for prompts of different lengths, padded on the left.
            decoder: a ``export.GraphedDecoder`` of this model, which then takes the steps after the prompt.

        Raises:
            MixerError: up front, when prompt and continuation together are longer than ``max_len``.
        """
        check_sampling(temperature, top_k, top_p)
        if decoder is not None and decoder.model is not self:
            raise MixerError("LM.generate: the decoder was made of another model.")
        self._check_prompt(tokens, n, key_mask)
        generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
        extend = self.extend if decoder is None else decoder.extend
        with evaluating(self):
            logits, state = self.prefill(tokens, key_mask=key_mask)
            out = [tokens]
            for i in range(n):
                token = pick_token(logits[:, -1], temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
                out.append(token.to(tokens.dtype))
                if i + 1 < n:
                    logits, state = extend(token, state)
        return torch.cat(out, 1)

    def prefill(self, tokens: Tensor, *, key_mask: Tensor | None = None) -> tuple[Tensor, LMState]:
        """Read a prompt (B, T) into a fresh state: the logits after its last chunk and the state. Padding every row shares is skipped."""
        state = self.init_state(tokens.shape[0], device=tokens.device)
        if key_mask is not None:
            shared = _shared_padding(key_mask)
            tokens, key_mask = tokens[:, shared:], key_mask[:, shared:]
        return self.extend(tokens, state, key_mask=key_mask)

    def _check_prompt(self, tokens: Tensor, n: int, key_mask: Tensor | None) -> None:
        if n < 0 or tokens.ndim != 2 or tokens.shape[1] < 1:
            raise MixerError(f"LM.generate: needs a prompt (batch, time >= 1) and n >= 0, got tokens {tuple(tokens.shape)} and n={n}.")
        length = tokens.shape[1]
        if key_mask is not None:
            if key_mask.dtype != torch.bool or key_mask.shape != tokens.shape:
                raise MixerError(f"LM.generate: expects a bool key_mask of shape {tuple(tokens.shape)}, got {key_mask.dtype} {tuple(key_mask.shape)}.")
            if not bool(key_mask[:, -1].all()):
                raise MixerError("LM.generate: every row of the prompt must end in a real token; pad on the left.")
            length -= _shared_padding(key_mask)
        if self.max_len is not None and length + n > self.max_len:
            most = max(self.max_len - length, 0)
            raise MixerError(f"LM.generate: a prompt of {length} tokens and n={n} make more than max_len={self.max_len}; at most n={most}.")


def _shared_padding(key_mask: Tensor) -> int:
    """How many leading columns are padding in every row."""
    return int((~key_mask.any(0)).long().cumprod(0).sum())
