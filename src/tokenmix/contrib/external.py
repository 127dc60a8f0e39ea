"""Simplified attention: attention without q, k and v projections (Guo et al. 2021, arXiv:2105.02358).

The paper replaces its keys by learned memories to obtain external attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.attention import attention
from ..kernels.backend import Backend
from ..kernels.precision import exact, sum_dtype
from ..mixers.base import About, Arguments, Facts, Inputs, Mixer, register_state
from ..mixers.cost import MixingCost
from ..mixers.parts.options import check_positive
from ..mixers.parts.shared import largest_dot, valid_mask


@exact
def simplified_attention(
    x: Tensor,
    k: Tensor,
    *,
    scale: float = 1.0,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute the simplified self-attention of the External Attention paper: no projections, one head.

    y_t = sum_s softmax_s(scale x_t . k_s) k_s, with k = x in self-mixing. Takes time O(T S D). The paper's scale is 1;
    the logits are then as large as |x|^2, so half precision is computed in float32.

    Args:
        x: (B, T, D), the queries.
        k: (B, S, D), used as keys and as values.
        scale: factor of the logits.
        causal, key_mask, attn_mask, backend: as in ``attention``.

    Returns:
        (B, T, D) in x's dtype.

    Raises:
        MixerError: the shapes of x and k do not fit, or ``attention`` refuses the call.
    """
    if x.ndim != 3 or k.ndim != 3 or x.shape[0] != k.shape[0] or x.shape[2] != k.shape[2]:
        raise MixerError(
            f"simplified_attention: expects x (B, T, D) and k (B, S, D), got {tuple(x.shape)} and {tuple(k.shape)}."
        )
    wide = sum_dtype(x)
    y = attention(
        x.to(wide),
        k.to(wide),
        k.to(wide),
        heads=1,
        scale=scale,
        causal=causal,
        key_mask=key_mask,
        attn_mask=attn_mask,
        backend=backend,
    )
    return y.to(x.dtype)


@register_state
class SimplifiedState(NamedTuple):
    """Every token so far: keys (B, S, D); valid (B, S) bool, True = may be attended."""

    keys: Tensor
    valid: Tensor


class SimplifiedAttention(Mixer):
    """y_t = W_o [sum_s softmax_s(scale x_t . x_s) x_s]: attention without q, k and v projections.

    Guo et al. 2021, arXiv:2105.02358, who replace its keys by learned memories to obtain external attention. Maps (B,
    T, D) to (B, T, D).

    Args:
        scale: factor on the logits, 1 by default as in the paper. The logit of a token with itself is scale |x|^2, so
            with many features a token attends little else.

    Parameters: out_proj, which is not part of the paper's equation. Time O(T^2 D). The streaming state is every token
    so far.

    Raises:
        MixerError: if ``scale`` is not a positive number.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        attn_mask=True,
        about=About("Guo et al. 2021, arXiv 2105.02358", "attention", "T^2 D", "T D"),
        form=simplified_attention,
        carries=("out_proj",),
    )

    def __init__(self, dim: int, *, causal: bool = False, scale: float = 1.0, out_bias: bool = True):
        super().__init__(dim, causal=causal)
        check_positive(self, scale=scale)
        self.scale = scale
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``simplified_attention`` for this input: (positional, keyword)."""
        return (inputs.x, inputs.keys), {
            "scale": self.scale,
            "causal": self.causal,
            "key_mask": inputs.key_mask,
            "attn_mask": inputs.attn_mask,
        }

    def mixing_cost(self, T: int) -> MixingCost:
        flops = 4 * T * T * self.dim
        return MixingCost(flops=flops, counted=flops, activations=4 * 2 * self.dim * T, state=(4 * self.dim + 1) * T)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        x, k = args
        own = options["scale"] * float(
            k.detach().square().sum(-1).max()
        )  # k is the value too, so its gradients are rounded relative to |k|^2
        return max(largest_dot(x, k, 1, 1, options["scale"]), own)

    def empty_state(self, batch_size, *, device, dtype):
        keys = torch.zeros(batch_size, 0, self.dim, device=device, dtype=dtype)
        return SimplifiedState(keys, torch.zeros(batch_size, 0, dtype=torch.bool, device=device))

    def context_state(self, context, context_mask):
        return SimplifiedState(context, valid_mask(context, context_mask))

    def mix_chunk(self, x, state, *, positions, key_mask):
        if self.causal:
            state = SimplifiedState(
                torch.cat([state.keys, x.to(state.keys.dtype)], 1), torch.cat([state.valid, valid_mask(x, key_mask)], 1)
            )
        y = simplified_attention(x, state.keys.to(x.dtype), scale=self.scale, causal=self.causal, key_mask=state.valid)
        return self.out_proj(y), state
