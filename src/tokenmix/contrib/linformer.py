"""Linformer (Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768).

Keys and values are shortened along time by learned matrices (Eq. 7). Bidirectional only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.attention import finite_attention
from ..functional.layout.heads import by_head
from ..functional.layout.masks import zero_masked
from ..functional.layout.positions import default_positions
from ..functional.sums.nonfinite import guard_nonfinite
from ..kernels.backend import Backend
from ..kernels.precision import at_least_float32, exact
from ..mixers.base import QKVO, About, Arguments, Facts, Inputs, Mixer, token_positions
from ..mixers.cost import MixingCost
from ..mixers.parts.options import at_least
from ..mixers.parts.shared import add_projections, largest_dot
from ..positions.grid import replacing_parameter


@exact
@guard_nonfinite("k", "v", asks="q")
def linformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    e: Tensor,
    f: Tensor,
    *,
    heads: int,
    positions: Tensor | None = None,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = softmax(q_t (E K)^T / sqrt(d)) (F V) in each head of width d.

    Args:
        q: (B, T, D). k, v: (B, S, D).
        e, f: (heads or 1, K, N), one column for each position of a key.
        positions: (B, S), the column of each key, below N. Default: index minus the index of the row's first True key.

    Masked keys add nothing to E K and F V; with no key at all both are 0, and so is the result. E K and F V are summed
    in float64. Time O((T + S) K D).
    """
    if e.shape[0] not in (1, heads) or f.shape[0] not in (1, heads) or q.shape[-1] % heads:
        given = f"D={q.shape[-1]}, e {tuple(e.shape)} and f {tuple(f.shape)}"
        raise MixerError(
            f"linformer: heads={heads} must divide D and needs e and f of 1 or {heads} matrices, got {given}."
        )
    if k.shape[1] > e.shape[-1]:
        raise MixerError(f"linformer: e has {e.shape[-1]} columns, one per position, got {k.shape[1]} keys.")
    kc, vc = project_length(k, e, heads, positions, key_mask), project_length(v, f, heads, positions, key_mask)
    wide = at_least_float32(q)
    return finite_attention(wide, kc.to(wide.dtype), vc.to(wide.dtype), heads=heads, backend=backend).to(q.dtype)


@exact
def project_length(k: Tensor, e: Tensor, heads: int, positions: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Compute E K: (B, S, D) and (heads or 1, K, N) -> (B, K, D), float64."""
    B, S, D = k.shape
    k = zero_masked(k, key_mask).double()
    if positions is None and key_mask is None:
        e = e[..., :S]
    else:
        positions = default_positions(B, S, key_mask, k.device) if positions is None else positions
        k = k.new_zeros(B, e.shape[-1], D).scatter_add(1, positions.long()[..., None].expand(-1, -1, D), k)
    if e.shape[0] == 1:
        return e[0].double() @ k
    return (e.double() @ by_head(k, heads)).transpose(1, 2).flatten(2)


SHARING = ("none", "headwise", "key_value", "layerwise")


class Linformer(Mixer):
    """Linformer: y_t = W_o [softmax(q_t (E K)^T / sqrt(d)) (F V)] in each head of width d.

    E and F project the time axis to ``rank`` rows. Wang et al. 2020, arXiv:2006.04768, Eq. 7. Maps (B, T, D) to (B, T,
    D). There is no causal form: each of the ``rank`` rows of E K sums keys of the whole sequence, later ones included,
    and no mask can separate them again.

    Args:
        max_len: number of columns of E and F, one per position; longer sequences and contexts are refused.
        rank: K, the number of rows of E and F, 64 by default.
        heads: number of heads, 8 by default; must divide dim.
        sharing: "none": E and F for each head; "headwise" (default): one E and one F for all heads; "key_value": one E
            = F for all heads; "layerwise": as "key_value", and ``tie(first)`` makes later layers use the projection of
            the first.

    E and F start as N(0, 1 / rank), the random projections of the paper's Theorem 2.

    Parameters: q_proj, k_proj, v_proj, out_proj, projection_e (E), projection_f (F) unless E = F. Time O(T K D).

    Raises:
        MixerError: if an option is out of its range, or a sequence is longer than ``max_len``.
    """

    facts = Facts(
        context=True,
        about=About("Wang et al. 2020, arXiv 2006.04768", "low rank", "T K D", "T (K H + D)"),
        form=linformer,
        carries=QKVO,
    )
    projection_f: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        *,
        max_len: int,
        causal: bool = False,
        rank: int = 64,
        heads: int = 8,
        sharing: str = "headwise",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal, max_len=max_len)
        at_least(self, 1, max_len=max_len, rank=rank)
        self.rank, self.heads, self.sharing = rank, heads, sharing
        if sharing not in SHARING:
            self.refuse(f"sharing={sharing!r}; choose one of {', '.join(SHARING)}")
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        shape = (heads if sharing == "none" else 1, rank, max_len)
        self.projection_e = nn.Parameter(torch.empty(shape))
        self.projection_f = nn.Parameter(torch.empty(shape)) if sharing in ("none", "headwise") else None
        self.init_parameters()

    def init_parameters(self) -> None:
        for projection in (self.projection_e, self.projection_f):
            if projection is not None:
                nn.init.normal_(projection, std=self.rank**-0.5)

    def tie(self, first: Linformer) -> None:
        """Share the projection of ``first``, which then is one parameter of both layers.

        Raises:
            MixerError: unless both layers were built with ``sharing="layerwise"`` and equal rank and max_len.
        """
        if not isinstance(first, Linformer) or self.sharing != "layerwise" or first.sharing != "layerwise":
            self.refuse("tie needs two Linformer layers built with sharing='layerwise'")
        if first.projection_e.shape != self.projection_e.shape:
            own, other = (tuple(layer.projection_e.shape[1:]) for layer in (self, first))
            self.refuse(f"tie needs equal rank and max_len, got {own} and {other}")
        self.projection_e = first.projection_e

    def resize(self, max_len: int) -> None:
        """Change the number of columns to ``max_len``, interpolating along positions.

        Tied layers become separate; tie them again.
        """
        if not isinstance(max_len, int) or max_len < 1:
            self.refuse(f"resize needs a positive length, got {max_len!r}")
        self.projection_e = replacing_parameter(self.projection_e, _interpolate_length(self.projection_e, max_len))
        if self.projection_f is not None:
            self.projection_f = replacing_parameter(self.projection_f, _interpolate_length(self.projection_f, max_len))
        self.max_len = self.max_context_len = max_len

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``linformer`` for this input: (positional, keyword)."""
        context, key_mask = inputs.context, inputs.key_mask
        keys = inputs.keys
        key_positions = (
            inputs.positions if context is None else None if key_mask is None else token_positions(context, key_mask)
        )
        f = self.projection_e if self.projection_f is None else self.projection_f
        args = self.q_proj(inputs.x), self.k_proj(keys), self.v_proj(keys), self.projection_e, f
        return args, {"heads": self.heads, "positions": key_positions, "key_mask": key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        flops = (
            4 * T * self.rank * self.dim + 4 * T * self.rank * self.dim
        )  # E K and F V; the weights and the weighted sums
        return MixingCost(
            flops=flops,
            counted=flops,
            activations=4 * T * (8 * self.dim) + 8 * T * self.rank * self.projection_e.shape[0],
        )

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        q, k, _, e, _ = (a.detach() for a in args)
        return largest_dot(
            q,
            project_length(k, e, options["heads"], options["positions"], options["key_mask"]).to(q.dtype),
            options["heads"],
        )


def _interpolate_length(projection: Tensor, length: int) -> Tensor:
    return F.interpolate(projection, size=length, mode="linear", align_corners=False)
