"""A mixer as somebody outside of the library writes one, with public names only."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix import Mixer
from tokenmix.mixers import QKVO, About, Facts, Inputs, MixingCost, register_state


@register_state
class MeanState(NamedTuple):
    """Sums over the past: of weighted values, and of weights."""

    total: Tensor
    weight: Tensor


def weighed(k: Tensor, v: Tensor, key_mask: Tensor | None, floor: float) -> tuple[Tensor, Tensor]:
    """Return positive weights of the keys times the values, and the weights, in float32 or better.

    Masked keys weigh nothing.
    """
    wide = torch.promote_types(k.dtype, torch.float32)
    weight = F.softplus(k.to(wide)) + floor
    if key_mask is not None:
        weight, v = (torch.where(key_mask[..., None], a, 0.0) for a in (weight, v))
    return weight * v.to(wide), weight


def weighed_mean(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    floor: float = 0.5,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """sigmoid(q_t) sum_s w_s v_s / sum_s w_s with w = softplus(k) + floor, over the keys that t may attend."""
    total, weight = weighed(k, v, key_mask, floor)
    total, weight = (a.cumsum(1) if causal else a.sum(1, keepdim=True) for a in (total, weight))
    return (torch.sigmoid(q) * (total / weight.clamp_min(1e-30))).to(q.dtype)


class WeighedMean(Mixer):
    """y_t = W_o [sigmoid(q_t) * mean of the values that t may attend, weighed by softplus(k) + floor].

    Args:
        floor: the least weight; it has no default, so ``example_options`` gives one.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        about=About("nobody, for a test", "kernel", "T D", "T D"),
        form=weighed_mean,
        carries=QKVO,
        only_qkv=True,
    )

    def __init__(self, dim: int, *, floor: float, causal: bool = False, qkv_bias: bool = True, out_bias: bool = True):
        super().__init__(dim, causal=causal)
        if floor <= 0:
            self.refuse(f"floor must be positive, got {floor!r}")
        self.floor = floor
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=qkv_bias) for _ in range(3))
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)

    @classmethod
    def example_options(cls, length, *, heads=None, grid=None):
        return {"floor": 0.5}

    def functional_args(self, inputs):
        x = inputs.x
        return (self.q_proj(x), self.k_proj(x), self.v_proj(x)), {
            "floor": self.floor,
            "causal": self.causal,
            "key_mask": inputs.key_mask,
        }

    def mixing_cost(self, T):
        return MixingCost(flops=8 * T * self.dim, counted=0, activations=20 * T * self.dim, state=8 * self.dim)

    def empty_state(self, batch_size, *, device, dtype):
        wide = torch.promote_types(dtype, torch.float32)
        return MeanState(*(torch.zeros(batch_size, self.dim, device=device, dtype=wide) for _ in range(2)))

    def mix_chunk(self, x, state, *, positions, key_mask):
        (q, k, v), _ = self.functional_args(Inputs(x))
        total, weight = weighed(k, v, key_mask, self.floor)
        total, weight = state.total[:, None] + total.cumsum(1), state.weight[:, None] + weight.cumsum(1)
        y = torch.sigmoid(q) * (total / weight.clamp_min(1e-30)).to(q.dtype)
        return self.out_proj(y), MeanState(total[:, -1], weight[:, -1])
