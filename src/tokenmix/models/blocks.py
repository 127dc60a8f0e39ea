"""The transformer block around any mixer: norm, mixer, residual; norm, MLP, residual."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..errors import MixerError
from ..mixers import MIXERS, State, build_mixer, mixer_options

NORMS = ("pre", "post")


class MLP(nn.Module):
    """W_2 gelu(W_1 x), the hidden layer ``ratio`` times as wide."""

    def __init__(self, dim: int, ratio: float = 4.0):
        super().__init__()
        self.up = nn.Linear(dim, int(dim * ratio))
        self.down = nn.Linear(int(dim * ratio), dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + mlp(norm(x)); with ``norm="post"``, norm(x + mixer(x)), then norm(x + mlp(x)).

    Args:
        spec: the mixer as JSON, ``{"name": "aft_local", "window": 32}``. Its ``max_len`` is filled in where the mixer has one and the spec does not say.
        causal: passed to the mixer.
    """

    def __init__(self, dim: int, spec: dict[str, Any], *, causal: bool, max_len: int, mlp_ratio: float = 4.0, norm: str = "pre", dropout: float = 0.0):
        super().__init__()
        if norm not in NORMS:
            raise MixerError(f"Block: norm={norm!r} is unknown; choose 'pre' or 'post'.")
        spec = complete_spec(spec, max_len)
        if causal and spec["name"] in MIXERS and not MIXERS[spec["name"]].supports_causal:
            raise MixerError(f"Block: {spec['name']} has no causal form, which this model needs; `tokenmix list` says which mixers have one.")
        self.pre = norm == "pre"
        self.mixer_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mixer = build_mixer(dim=dim, causal=causal, **spec)
        self.mlp = MLP(dim, mlp_ratio)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        if self.pre:
            x = x + self.dropout(self.mixer(self.mixer_norm(x), key_mask=key_mask))
            return x + self.dropout(self.mlp(self.mlp_norm(x)))
        x = self.mixer_norm(x + self.dropout(self.mixer(x, key_mask=key_mask)))
        return self.mlp_norm(x + self.dropout(self.mlp(x)))

    def extend(self, x: Tensor, state: State, *, key_mask: Tensor | None = None) -> tuple[Tensor, State]:
        """The next chunk (B, L, D) and the mixer's state -> the chunk's outputs and the new state."""
        mixed, state = self.mixer.extend(self.mixer_norm(x) if self.pre else x, state, key_mask=key_mask)
        if self.pre:
            x = x + self.dropout(mixed)
            return x + self.dropout(self.mlp(self.mlp_norm(x))), state
        x = self.mixer_norm(x + self.dropout(mixed))
        return self.mlp_norm(x + self.dropout(self.mlp(x))), state


def complete_spec(spec: dict[str, Any], max_len: int) -> dict[str, Any]:
    """The spec with the model's ``max_len`` where the mixer has that option and the spec leaves it open."""
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise MixerError(f'a mixer spec is an object with a name, like {{"name": "attention", "heads": 4}}; got {spec!r}.')
    for taken in ("causal", "dim"):
        if taken in spec:
            raise MixerError(f"the model sets {taken!r} of every mixer; leave it out of the spec {spec!r}.")
    cls = MIXERS.get(spec["name"])
    if cls is not None and "max_len" in mixer_options(cls):
        return {"max_len": max_len, **spec}
    return dict(spec)
