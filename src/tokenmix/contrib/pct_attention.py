"""Offset attention of the Point Cloud Transformer (Guo et al. 2020, arXiv:2012.09688).

What a point is beyond the average that it attends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.layout.checks import check_key_mask, check_scale
from ..functional.layout.masks import zero_masked
from ..functional.sums.nonfinite import guard_nonfinite
from ..kernels.backend import Backend, choose
from ..kernels.precision import at_least_float32, cast_alike, exact
from ..mixers.base import About, Arguments, Facts, Inputs, Mixer
from ..mixers.cost import MixingCost
from ..mixers.parts.options import at_least, check_positive, one_of
from ..mixers.parts.shared import largest_dot
from ..mixers.parts.token_norm import LBR


@exact
@guard_nonfinite("q", "k", "v", "x")
def pct_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    *,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = x_t - sum_s a_ts v_s, the offset of each token from its attention output (PCT, Eqs. 7 to 9).

    b_ts = exp(scale q_t . k_s) / sum_u exp(scale q_u . k_s) is a softmax over the queries, and a_ts = b_ts / sum_r b_tr
    has l1 norm 1 over the keys. Both are computed as one softmax over the keys, of scale q_t . k_s - log sum_u
    exp(scale q_u . k_s), so that a query whose b all underflow still has weights.

    Args:
        q, k: (B, T, d).
        v, x: (B, T, D).
        scale: factor of the logits; the paper has none.
        key_mask: (B, T) bool, False = neither a key nor a query in the softmax of others.

    Returns:
        (B, T, D) in v's dtype; 0 in rows without a valid token. Time O(T^2 (d + D)).

    Raises:
        MixerError: the shapes do not fit, or ``scale`` is not a positive number.
    """
    choose("pct_attention", backend, q)
    check_scale("pct_attention", scale)
    if q.ndim != 3 or q.shape != k.shape or v.shape != x.shape or v.shape[:2] != q.shape[:2]:
        shapes = ", ".join(str(tuple(a.shape)) for a in (q, k, v, x))
        raise MixerError(f"pct_attention: expects q, k (B, T, d) and v, x (B, T, D), got {shapes}.")
    check_key_mask("pct_attention", key_mask, k)
    kind = v.dtype
    q, k, v, x = cast_alike(*map(at_least_float32, (q, zero_masked(k, key_mask), zero_masked(v, key_mask), x)))
    if q.shape[1] == 0:
        return v.to(kind)
    logits = (scale * q) @ k.mT
    if key_mask is None:
        return (x - offsets(logits, logits).softmax(-1) @ v).to(kind)
    some = key_mask.any(1)[:, None, None]
    asked = logits.masked_fill(~(key_mask[:, :, None] | ~some), float("-inf"))
    weights = offsets(logits, asked).masked_fill(~(key_mask[:, None] | ~some), float("-inf")).softmax(-1)
    return torch.where(some, x - weights @ v, 0.0).to(kind)


def offsets(logits: Tensor, asked: Tensor) -> Tensor:
    """Return the logarithm of the softmax over queries: logits (B, T, S) less the log-sum-exp of ``asked`` over T."""
    return logits - torch.logsumexp(asked, 1, keepdim=True)


class PCTAttention(Mixer):
    """Offset attention of PCT: y_t = relu(BN(W_o (x_t - sum_s a_ts v_s))).

    The weights a are normalised over the queries, then over the keys.

    Guo et al. 2020, "PCT: Point Cloud Transformer", arXiv:2012.09688, Eqs. 7 to 9. Maps (B, T, D) to (B, T, D). The
    input is added by the model's block, as for every mixer. There is no causal form, since each weight is normalised
    over all queries, and positions do not enter: the mixer is permutation-equivariant.

    Args:
        key_width: width of queries and keys; None (default): dim // 4, at least 1, as in the paper.
        tied: True: W_k = W_q, as in the authors' code. Default False, as in the paper's equation.
        norm: "batch" (default): the paper's LBR, a linear layer, batch normalisation and relu. None: its linear layer
            only, for models whose blocks normalise and rectify.
        scale: factor of the logits, 1 by default, since the paper's offset attention has none.
        qk_bias: whether q_proj and k_proj have biases, False by default as in the authors' code.

    Parameters: q_proj, k_proj unless tied, v_proj and out_proj, which holds the norm with its running statistics. Time
    O(T^2 D). In train mode the norm couples the rows of a batch.

    Deviations: no 1e-9 in the denominator of the l1 norm, which the authors' code has: logarithms make it needless.

    Raises:
        MixerError: if an option is out of its range, or with ``causal=True``.
    """

    facts = Facts(
        about=About(
            "Guo et al. 2020, arXiv 2012.09688",
            "attention",
            "T^2 D",
            "T^2 + T D",
            idea="a token less the average it attends, normalised over queries, then over keys",
        ),
        form=pct_attention,
        carries=("v_proj",),
        signed=True,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        key_width: int | None = None,
        tied: bool = False,
        norm: str | None = "batch",
        scale: float = 1.0,
        qk_bias: bool = False,
        v_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.key_width = max(dim // 4, 1) if key_width is None else key_width
        at_least(self, 1, key_width=self.key_width)
        check_positive(self, scale=scale)
        one_of(self, ("batch", None), norm=norm)
        self.scale, self.tied, self.rectified = scale, tied, norm == "batch"
        self.q_proj = nn.Linear(dim, self.key_width, bias=qk_bias)
        if not tied:
            self.k_proj = nn.Linear(dim, self.key_width, bias=qk_bias)
        self.v_proj = nn.Linear(dim, dim, bias=v_bias)
        self.out_proj = LBR(dim, dim, bias=out_bias) if self.rectified else nn.Linear(dim, dim, bias=out_bias)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``pct_attention`` for this input: (positional, keyword)."""
        x = inputs.x
        q = self.q_proj(x)
        k = q if self.tied else self.k_proj(x)
        return (q, k, self.v_proj(x), x), {"scale": self.scale, "key_mask": inputs.key_mask}

    def mix(self, inputs: Inputs) -> Tensor:
        args, options = self.functional_args(inputs)
        y = pct_attention(*args, **options)
        return self.out_proj(y, key_mask=inputs.key_mask) if self.rectified else self.out_proj(y)

    def mixing_cost(self, T: int) -> MixingCost:
        flops = 2 * T * T * (self.dim + self.key_width)
        kept = 2 * T * T + (5 if self.rectified else 3) * T * self.dim + 3 * T * self.key_width
        return MixingCost(flops=flops, counted=flops, activations=4 * kept)

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        return 2 * largest_dot(args[0], args[1], 1, 1, options["scale"])  # its log-sum-exp is subtracted
