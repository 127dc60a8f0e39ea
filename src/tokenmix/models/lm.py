"""A byte language model over any mixers: parallel for training, streaming for generation, the two equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..mixers import State
from ..mixers.base import chunk_positions, register_state, token_positions
from ..positions import LearnedPositions
from ._json import from_json, to_json
from .blocks import Block
from .sampling import check_sampling, pick_token

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


@dataclass(frozen=True)
class LMConfig:
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
        for name in ("dim", "max_len", "vocab"):
            if getattr(self, name) < 1:
                raise MixerError(f"LMConfig: {name} must be positive, got {getattr(self, name)}.")
        if not self.mixers:
            raise MixerError("LMConfig: mixers is empty; give at least one spec.")
        if self.layers is not None and self.layers < len(self.mixers):
            raise MixerError(f"LMConfig: layers={self.layers} is fewer than the {len(self.mixers)} mixers given.")
        if self.positions not in ("learned", None):
            raise MixerError(f"LMConfig: positions={self.positions!r} is unknown; choose 'learned' or null.")
        if not 0 <= self.dropout < 1:
            raise MixerError(f"LMConfig: dropout must be in [0, 1), got {self.dropout}.")

    def specs(self) -> list[dict[str, Any]]:
        """One mixer spec per layer."""
        return [self.mixers[i % len(self.mixers)] for i in range(self.layers or len(self.mixers))]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; ``LMConfig.from_json`` is the way back."""
        return to_json(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LMConfig:
        """A config from JSON values; unknown fields are refused."""
        return from_json(cls, data)


@register_state
class LMState(NamedTuple):
    """The mixers' states, one per layer, and the next position of each row (B,)."""

    layers: tuple[State, ...]
    position: Tensor


class LM(nn.Module):
    """Embedding, blocks, norm, head. Causal: logits at t read tokens 0..t.

    Args:
        config: an ``LMConfig``.
    """

    def __init__(self, config: LMConfig):
        super().__init__()
        self.config = config
        with torch.random.fork_rng():  # the children draw once while being built; only reset_parameters below may count, or a meta build would differ
            self.embed = nn.Embedding(config.vocab, config.dim)
            self.positions = LearnedPositions(config.dim, max_len=config.max_len) if config.positions else None
            options: dict[str, Any] = {"causal": True, "max_len": config.max_len, "mlp_ratio": config.mlp_ratio, "norm": config.norm, "dropout": config.dropout}
            self.blocks: Any = nn.ModuleList(Block(config.dim, spec, **options) for spec in config.specs())
            self.norm = nn.LayerNorm(config.dim) if config.norm == "pre" else nn.Identity()
            self.head = nn.Linear(config.dim, config.vocab, bias=False) if not config.tied else None
            self.dropout = nn.Dropout(config.dropout)
        self.reset_parameters()

    @property
    def max_len(self) -> int | None:
        """The longest sequence this model takes; None where nothing in it has a length."""
        limits: list[int] = [block.mixer.max_len for block in self.blocks if block.mixer.max_len is not None]
        return min([*limits, *([self.positions.max_len] if self.positions else [])], default=None)

    def reset_parameters(self) -> None:
        """Initialise every parameter again from torch's generator."""
        std = self.config.init_std
        nn.init.normal_(self.embed.weight, std=std)
        if self.positions is not None:
            self.positions.reset_parameters()
        for block in self.blocks:
            self._reset_block(block, std, std / (2 * len(self.blocks)) ** 0.5)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=std)
        if isinstance(self.norm, nn.LayerNorm):
            self.norm.reset_parameters()

    def _reset_block(self, block: Any, std: float, residual_std: float) -> None:
        block.mixer_norm.reset_parameters()
        block.mlp_norm.reset_parameters()
        block.mixer.reset_parameters()
        for name, child in block.mixer.named_children():
            if name in PROJECTIONS and isinstance(child, nn.Linear):
                _init_linear(child, residual_std if name == "out_proj" else std)
        block.mixer.start_copies()
        _init_linear(block.mlp.up, std)
        _init_linear(block.mlp.down, residual_std)

    def forward(self, tokens: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """tokens (B, T) integers -> logits (B, T, vocab).

        Args:
            key_mask: (B, T) bool, False where a token is padding (left or right). Logits at padding mean nothing.
        """
        self._check_tokens(tokens)
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(token_positions(tokens, key_mask))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, key_mask=key_mask)
        return self._logits(x)

    def init_state(self, batch_size: int) -> LMState:
        """The state before the first token."""
        start = torch.zeros(batch_size, dtype=torch.long, device=self.embed.weight.device)
        return LMState(tuple(block.mixer.init_state(batch_size) for block in self.blocks), start)

    def extend(self, tokens: Tensor, state: LMState, *, key_mask: Tensor | None = None) -> tuple[Tensor, LMState]:
        """The next L >= 1 tokens (B, L) -> their logits (B, L, vocab), equal to ``forward`` on everything so far, and the new state."""
        self._check_tokens(tokens)
        at, after = chunk_positions(state.position, tokens, None, key_mask)
        x = self.embed(tokens)
        if self.positions is not None:
            if not torch.compiler.is_compiling() and int(after.max()) > self.positions.max_len:
                raise MixerError(f"LM: was built with max_len={self.positions.max_len}, this chunk would end at length {int(after.max())}; stop here.")
            x = x + self.positions(at)
        x = self.dropout(x)
        states = []
        for block, old in zip(self.blocks, state.layers, strict=True):
            x, new = block.extend(x, old, key_mask=key_mask)
            states.append(new)
        return self._logits(x), LMState(tuple(states), after)

    def _logits(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.head(x) if self.head is not None else nn.functional.linear(x, self.embed.weight)

    def _check_tokens(self, tokens: Tensor) -> None:
        if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise MixerError(f"LM: expects integer tokens of shape (batch, time), got {tokens.dtype} {tuple(tokens.shape)}.")
        if self.max_len is not None and tokens.shape[1] > self.max_len:
            raise MixerError(f"LM: was built with max_len={self.max_len}, got {tokens.shape[1]} tokens; cut them, or build with a larger max_len.")
        if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            low, high = (int(n) for n in tokens.aminmax())
            if low < 0 or high >= self.config.vocab:
                raise MixerError(f"LM: tokens must be in 0..{self.config.vocab - 1}, got {low} to {high}.")

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
    ) -> Tensor:
        """Continue each row of the prompt tokens (B, T) by n tokens, streaming. Returns (B, T + n).

        Args:
            temperature: 0 takes the most likely token.
            top_k, top_p: keep the k most likely tokens, then the fewest that hold probability p.
            seed: makes the choice repeatable; default draws from torch's generator.
            key_mask: (B, T) bool for prompts of different lengths, padded on the left.

        Raises:
            MixerError: up front, when prompt and continuation together are longer than ``max_len``.
        """
        check_sampling(temperature, top_k, top_p)
        self._check_prompt(tokens, n, key_mask)
        generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
        was_training = self.training
        self.eval()
        try:
            logits, state = self.prefill(tokens, key_mask=key_mask)
            out = [tokens]
            for i in range(n):
                token = pick_token(logits[:, -1], temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
                out.append(token.to(tokens.dtype))
                if i + 1 < n:
                    logits, state = self.extend(token, state)
        finally:
            self.train(was_training)
        return torch.cat(out, 1)

    def prefill(self, tokens: Tensor, *, key_mask: Tensor | None = None) -> tuple[Tensor, LMState]:
        """Read a prompt (B, T) into a fresh state: the logits after its last chunk and the state. Padding every row shares is skipped."""
        state = self.init_state(tokens.shape[0])
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


def _init_linear(layer: nn.Linear, std: float) -> None:
    nn.init.normal_(layer.weight, std=std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _shared_padding(key_mask: Tensor) -> int:
    """How many leading columns are padding in every row."""
    return int((~key_mask.any(0)).long().cumprod(0).sum())
