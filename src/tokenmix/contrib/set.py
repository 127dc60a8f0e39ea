"""Induced set attention (ISAB), two attentions with m learned points, and pooling by attention (PMA) as a module.

Lee et al. 2019, "Set Transformer", arXiv:1810.00825, Eq. 10.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.attention import attention, finite_attention
from ..functional.layout.masks import zero_masked
from ..functional.sums.nonfinite import guard_nonfinite
from ..kernels.backend import Backend
from ..kernels.precision import at_least_float32, exact
from ..mixers.base import About, Arguments, Facts, Inputs, Mixer
from ..mixers.cost import MixingCost
from ..mixers.parts.options import at_least, check_heads
from ..mixers.parts.shared import largest_dot
from ..mixers.parts.weights_on_call import ReadLayerNorm, ReadLinear, child_weights


@exact
@guard_nonfinite("k", "v", asks="q")
def induced_set(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    points: Tensor,
    maps: tuple[Tensor, ...],
    block: tuple[Tensor, ...] = (),
    *,
    heads: int,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y = attention(q, W_k h, W_v h) with h = attention(points, k, v), each of ``heads`` heads.

    Args:
        q: (B, T, D). k, v: (B, S, D).
        points: (m, D), the queries of the first attention.
        maps: (W_k, W_v), or (W_k, W_v, b_k, b_v): the keys and values of the second attention.
        block: empty, or (g_1, c_1, W, b, g_2, c_2): then h = LN_2(a + relu(W a + b)), a = LN_1(points + attention),
            with gains g and shifts c.

    With no key to attend the result is exactly 0. The m rows of h are computed in float64. Time O((T + S) m D).
    Positions are not used.
    """
    if q.shape[-1] % heads or points.shape[-1] != q.shape[-1]:
        raise MixerError(
            f"induced_set: heads={heads} must divide D={q.shape[-1]}, the width of points {tuple(points.shape)}."
        )
    h = summarize_points(k, v, points, block, heads=heads, key_mask=key_mask)
    keys, values = (F.linear(h, w.double(), b) for w, b in zip(maps[:2], _biases(maps), strict=True))
    wide = at_least_float32(q)
    y = finite_attention(wide, keys.to(wide.dtype), values.to(wide.dtype), heads=heads, backend=backend).to(q.dtype)
    if k.shape[1] == 0:
        return torch.zeros_like(y)
    return y if key_mask is None else torch.where(key_mask.any(1)[:, None, None], y, 0.0)


@exact
def summarize_points(
    k: Tensor, v: Tensor, points: Tensor, block: tuple[Tensor, ...], *, heads: int, key_mask: Tensor | None
) -> Tensor:
    """Compute the induced points' summary h (B, m, D) of the keys and values, float64."""
    asked = points.double().expand(k.shape[0], -1, -1)
    h = attention(asked, zero_masked(k, key_mask).double(), v.double(), heads=heads, key_mask=key_mask)
    if not block:
        return h
    gain_1, shift_1, weight, bias, gain_2, shift_2 = (a.double() for a in block)
    a = F.layer_norm(asked + h, gain_1.shape, gain_1, shift_1)
    return F.layer_norm(a + F.linear(a, weight, bias).relu(), gain_2.shape, gain_2, shift_2)


def _biases(maps: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if len(maps) == 2 else (maps[2].double(), maps[3].double())


class InducedSet(Mixer):
    """ISAB_m(X) = MAB(X, MAB(I, X)): m learned points I attend the tokens, then the tokens attend the points.

    Lee et al. 2019, arXiv:1810.00825, Eq. 10. Maps (B, T, D) to (B, T, D). The mixer is the two attentions. Of MAB(X,
    Y) = LN(H + rFF(H)), H = LN(X + multihead(X, Y, Y)), the outer residual, norms and feed-forward belong to the
    model's block, as for every mixer; those of the inner MAB(I, X) lie between the attentions and belong to the mixer
    with ``inner="mab"``. There is no causal form: each point summarises the whole set before any token reads it.
    Positions do not enter: the mixer is permutation-equivariant.

    Args:
        points: m, the number of induced points, 32 by default.
        heads: number of heads of both attentions, 8 by default; must divide dim.
        inner: "attention" (default): h = multihead(I, X, X); "mab": h = LN(A + relu(W A + b)), A = LN(I + multihead(I,
            X, X)).

    Parameters: q_proj, k_proj, v_proj, point_k_proj, point_v_proj, out_proj, points (m, D); norm_1, feed, norm_2 with
    "mab". Time O(T m D).

    Raises:
        MixerError: if an option is out of its range, or with ``causal=True``.
    """

    facts = Facts(
        context=True,
        form=induced_set,
        about=About("Lee et al. 2019, arXiv 1810.00825", "memory", "T m D", "T (m H + D)"),
        carries=("q_proj", "out_proj"),  # its k_proj and v_proj see the points, not the tokens
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        points: int = 32,
        heads: int = 8,
        inner: str = "attention",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.heads, self.inner = heads, inner
        check_heads(self, heads)
        at_least(self, 1, points=points)
        if inner not in ("attention", "mab"):
            self.refuse(f"inner={inner!r}; choose 'attention' or 'mab'")
        self.q_proj = nn.Linear(dim, dim, bias=qkv_bias)
        self.k_proj = nn.Linear(dim, dim, bias=qkv_bias)
        self.v_proj = nn.Linear(dim, dim, bias=qkv_bias)
        self.point_k_proj = ReadLinear(dim, dim, bias=qkv_bias)
        self.point_v_proj = ReadLinear(dim, dim, bias=qkv_bias)
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)
        self.norm_1 = ReadLayerNorm(dim) if inner == "mab" else None
        self.feed = ReadLinear(dim, dim) if inner == "mab" else None
        self.norm_2 = ReadLayerNorm(dim) if inner == "mab" else None
        self.points = nn.Parameter(torch.empty(points, dim))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.xavier_uniform_(self.points)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``induced_set`` for this input: (positional, keyword)."""
        x = inputs.x
        keys = inputs.keys
        of_k, of_v = child_weights(self, self.point_k_proj, x), child_weights(self, self.point_v_proj, x)
        maps = of_k[0], of_v[0], *of_k[1:], *of_v[1:]
        block: tuple[Tensor, ...] = ()
        if self.norm_1 is not None and self.feed is not None and self.norm_2 is not None:
            block = (
                *child_weights(self, self.norm_1, x),
                *child_weights(self, self.feed, x),
                *child_weights(self, self.norm_2, x),
            )
        args = self.q_proj(x), self.k_proj(keys), self.v_proj(keys), self.points, maps, block
        return args, {"heads": self.heads, "key_mask": inputs.key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        m, D = len(self.points), self.dim
        return MixingCost(
            flops=8 * T * m * D,
            counted=8 * T * m * D,
            activations=4 * T * (10 * D) + 8 * T * m * self.heads,
            projections=2 * D * D * (4 * T + (2 if self.inner == "attention" else 3) * m),
        )

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        q, k, v, points, maps, block = args
        with torch.no_grad():
            h = summarize_points(k, v, points, block, heads=options["heads"], key_mask=options["key_mask"])
            keys = F.linear(h, maps[0].double(), maps[2].double() if len(maps) > 2 else None)
            first = largest_dot(points[None].double().expand(len(k), -1, -1), k.double(), options["heads"])
            return max(first, largest_dot(q.double(), keys, options["heads"]))


class PMA(nn.Module):
    """Pooling by multihead attention, PMA_k(Z) = MAB(S, rFF(Z)): a set (B, T, D) to (B, k, D).

    Lee et al. 2019, arXiv:1810.00825, Eq. 11. MAB(X, Y) = LN(H + rFF(H)), H = LN(X + multihead(X, Y, Y)); each rFF is
    relu(Linear), as in the paper's experiments. The seeds S are the queries, without a projection. The order of the set
    does not matter. It is not in ``MIXERS``, because it changes the length.

    Args:
        dim: number of features D.
        seeds: k, the number of output vectors per set, 1 by default.
        heads: number of heads, 8 by default; must divide dim.

    Raises:
        MixerError: if heads do not divide dim or ``seeds`` is not a positive integer.
    """

    def __init__(self, dim: int, *, seeds: int = 1, heads: int = 8):
        super().__init__()
        if not isinstance(heads, int) or heads < 1 or dim % heads or not isinstance(seeds, int) or seeds < 1:
            raise MixerError(f"PMA: heads={heads!r} must divide dim={dim}, and seeds={seeds!r} be a positive integer.")
        self.dim, self.heads = dim, heads
        self.feed_in, self.k_proj, self.v_proj, self.feed_out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.seeds = nn.Parameter(torch.empty(seeds, dim))
        nn.init.xavier_uniform_(self.seeds)

    def reset_parameters(self) -> None:
        """Initialise all parameters again, in the order of construction."""
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]  # Linear and LayerNorm
        nn.init.xavier_uniform_(self.seeds)

    def forward(self, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Map x (B, T, D) to (B, k, D). The output for an empty set depends only on the seeds.

        Args:
            key_mask: (B, T) bool, True = this token counts.

        Raises:
            MixerError: if x or key_mask has a wrong shape or dtype.
        """
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise MixerError(f"PMA: expects x of shape (batch, members, {self.dim}), got {tuple(x.shape)}.")
        if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != x.shape[:2]):
            got = f"{key_mask.dtype} {tuple(key_mask.shape)}"
            raise MixerError(f"PMA: expects a bool key_mask of shape {tuple(x.shape[:2])}, got {got}.")
        z = self.feed_in(x if key_mask is None else torch.where(key_mask[..., None], x, 0.0)).relu()
        queries = self.seeds.to(x.dtype).expand(len(x), -1, -1)
        h = self.norm_1(
            queries + attention(queries, self.k_proj(z), self.v_proj(z), heads=self.heads, key_mask=key_mask)
        )
        return self.norm_2(h + self.feed_out(h).relu())
