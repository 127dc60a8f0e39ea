"""A text encoder over any mixers: every token sees both sides. It predicts masked tokens, or a class of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.layout.checks import check_key_mask
from ..mixers.base import token_positions
from ..system.config import Json
from ..types import Spec
from .blocks import cycle_specs
from .layers import MLPKind, NormType, init_linear
from .looped import LoopConfig, check_loop
from .trunk import Trunk, check_trunk

POOLS = ("mean", "first")


@dataclass(frozen=True)
class EncoderConfig(Json):
    """A text encoder as JSON. The fields not listed here are those of ``LMConfig``.

    Args:
        classes: number of classes of a whole text; 0: the head predicts tokens instead, as for masked language models.
        pool: what the classes are read from: "mean" of the tokens, or the "first" of them.
    """

    dim: int
    max_len: int
    mixers: tuple[Spec, ...]
    layers: int | None = None
    vocab: int = 256
    classes: int = 0
    pool: str = "mean"
    mlp_ratio: float = 4.0
    norm: str = "pre"
    norm_type: NormType = "layer"
    mlp: MLPKind = "gelu"
    mlp_bias: bool = True
    positions: str | None = "learned"
    tied: bool = True
    dropout: float = 0.0
    init_std: float = 0.02
    loop: LoopConfig | None = None
    kind: ClassVar[str] = "encoder"
    logit_cap: ClassVar[float | None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixers", tuple(self.mixers))
        check_trunk(self, "dim", "max_len", "vocab")
        check_plain_positions(self.positions, "EncoderConfig")
        check_loop(self.loop, "EncoderConfig")
        if self.classes < 0 or self.classes == 1:
            raise MixerError(f"EncoderConfig: classes must be 0 or at least 2, got {self.classes}.")
        if self.pool not in POOLS:
            raise MixerError(f"EncoderConfig: pool={self.pool!r} is unknown; choose 'mean' or 'first'.")

    def specs(self) -> list[Spec]:
        """Return one mixer spec per layer."""
        return cycle_specs(self.mixers, self.layers)


def check_plain_positions(positions: object, who: str) -> None:
    """Refuse added positions other than learned and sinusoidal ones; ``who`` is named in the error."""
    if positions not in ("learned", "sinusoidal", None):
        raise MixerError(f"{who}: positions={positions!r} is unknown; choose 'learned', 'sinusoidal' or null.")


class Encoder(Trunk):
    """Embedding, blocks that see both sides, norm, and a head over tokens or classes.

    Args:
        config: an ``EncoderConfig``.
    """

    config_class = EncoderConfig
    pipeline_tags = "text-classification", "fill-mask"

    def __init__(self, config: EncoderConfig):
        super().__init__(config, vocab=config.vocab, loop=config.loop, causal=False)
        self.config = config
        if config.classes:
            with torch.random.fork_rng():
                self.head = None  # type: ignore[assignment]  # nothing predicts tokens
                self.classifier = nn.Linear(config.dim, config.classes)
            init_linear(self.classifier, config.init_std)

    def reset_parameters(self) -> None:
        """Re-initialise every parameter from torch's generator."""
        super().reset_parameters()
        if hasattr(self, "classifier"):
            init_linear(self.classifier, self.init_std)

    def forward(
        self,
        tokens: Tensor,
        key_mask: Tensor | None = None,
        chosen: Tensor | None = None,
        *,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Map integer tokens (B, T) to logits (B, T, vocab), or (B, classes) where the model has classes.

        Args:
            key_mask: (B, T) bool, False where a token is padding.
            chosen: (B, M) indices of the tokens to predict, if not all are: the logits are then (B, M, vocab).
            starts: (B, T) bool, True where a text begins, for rows that hold several; each sees itself only, and its
                positions count from 0. Not for models with classes, which take one text in each row.
        """
        if starts is not None and self.config.classes:
            raise MixerError("Encoder: a model with classes takes one text in each row; leave starts out.")
        x = self.embedded_text(tokens, key_mask, starts)
        if self.config.classes:
            return self.classifier(pool_tokens(x, key_mask, self.config.pool))
        if chosen is not None:
            x = x.gather(1, chosen[..., None].expand(-1, -1, x.shape[2]))
        return self.logits(x)

    def embedded_text(self, tokens: Tensor, key_mask: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
        """Map integer tokens (B, T) to the features (B, T, D) that the head reads."""
        self.check_symbols(tokens)
        check_key_mask("Encoder", key_mask, tokens)
        if self.max_len is not None and tokens.shape[1] > self.max_len:
            raise MixerError(
                f"Encoder: the model was built with max_len={self.max_len}, got {tokens.shape[1]} tokens; "
                + "shorten them, or build with a larger max_len."
            )
        if starts is not None:
            at, ends = self.packed_positions(tokens, starts, key_mask)
            return self.features(self.embed_at(tokens, at), cu_seqlens=ends)
        return self.features(self.embed_at(tokens, token_positions(tokens, key_mask)), key_mask=key_mask)


def pool_tokens(x: Tensor, key_mask: Tensor | None, how: str) -> Tensor:
    """Pool (B, T, D) to (B, D): the "mean" of the valid tokens, or the "first" or the "last" of them."""
    valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if key_mask is None else key_mask
    if how == "mean":
        return torch.where(valid[..., None], x, 0).sum(1) / valid.sum(1, keepdim=True).clamp_min(1).to(x.dtype)
    steps, last = torch.arange(x.shape[1], device=x.device), x.shape[1] - 1
    at = torch.where(valid, steps, last).amin(1) if how == "first" else torch.where(valid, steps, 0).amax(1)
    return x[torch.arange(x.shape[0], device=x.device), at]
