"""AFT-conv (Zhai et al. 2021, arXiv:2105.14103, Eq. 6) as a layer, in one, two and three dimensions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..functional import aft_chunk as chunk
from ..functional.sums.gates import Gate
from ..functional.sums.window import FILTERS, OUTSIDES, Filters, Outside
from .base import About, Arguments, Facts, Inputs, Kernels
from .cost import MixingCost
from .parts.aft import add_projections, empty_ring, join_ring_states, queries, ring_step
from .parts.options import check_heads, check_spread, one_of
from .parts.patterns import build_distance_bias
from .parts.shared import ring_chunk
from .segments import Segmented


class AFTConv(Segmented):
    """AFT-conv: AFT with a bias that is one convolution filter per head.

    y_t = W_o [sigma(q_t) * sum_s exp(k_s^i + w^i_{s-t}) v_s / sum_s exp(k_s^i + w^i_{s-t})] in head i of h. Zhai et al.
    2021, arXiv:2105.14103, Eq. 6. Maps (B, T, D) to (B, T, D).

    Args:
        heads: h; must divide dim. Each head has one key and one filter, which its dim / h channels share.
        kernel_size: s, the number of taps along each axis; odd.
        ndim: 1 (default) for sequences, causal or not; 2 or 3 for grids, whose size is given at call time.
        bias: None (default), or a function of the distance instead of learned filters, one for each head: {"name":
            "alibi", "t5", "kerple" or "sandwich"} with the options of the class in ``tokenmix.positions``. With
            ``ndim=1`` only; ``reparam`` and ``init_std`` are not used.
        reparam: True (default): w^i = gamma^i (raw^i - mean) / std + beta^i as in the paper, gamma and beta starting at
            0; False: w is the raw filter.
        init_std: standard deviation of the raw filter at the start, 0.02 by default; used with ``reparam=False`` only,
            otherwise it is 1.
        outside: "zero" (default) gives tokens outside of the kernel a bias of 0; "none" does not attend them.
        filters: "exp" (default): a tap w multiplies exp(k) by exp(w); "signed", a method of its own: it adds w exp(k) v
            to the numerator, w of either sign, and the denominator is the sum of exp(k). With ``outside="none"`` only
            the sum over the taps remains, and beta starts at 1. Not with ``bias``.
        divide: True (default); False, a method of its own: the numerator alone. Outputs then grow as exp(k).
        gate: as in AFTSimple.

    With ``reparam`` the mixer starts as AFT-simple with one key per head, and raw receives no gradient until gamma has
    moved.

    Parameters: q_proj, k_proj (dim -> h), v_proj, out_proj, raw (h, s, ...), gamma (h), beta (h), or bias. Time O(T s
    D).

    Deviations: the paper does not define the estimator of std; we use the population deviation plus 1e-5, so that a
    kernel of one tap is defined. The causal form is ours.

    Raises:
        MixerError: if an option is out of its range, or if the grid does not have ``ndim`` axes.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        grid=True,
        fixed_when_traced="causal",
        page="aft",
        about=About(
            "Zhai et al. 2021, arXiv 2105.14103",
            "attention free",
            "T s D",
            "T D",
            idea="AFT with the bias as one filter per head",
            tier="core",
        ),
        knows_positions=True,
        form="aft_conv",
        waivers={
            "accurate_on_adversarial_keys": "numerators alone reach exp(160) on these keys, beyond float32",
            "runs_under_autocast": "numerators alone grow as exp(k), beyond float16 for keys above 11",
            "finite_at_large_keys": "numerators alone grow as exp(k), beyond float32 for keys above 88",
        },
        carries=("v_proj", "out_proj"),  # AFT, Table 8
        kernels=Kernels(("aft_band", "aft_conv2d"), step="ring"),
    )

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kernel_size: int,
        causal: bool = False,
        ndim: int = 1,
        bias: dict[str, Any] | None = None,
        reparam: bool = True,
        init_std: float = 0.02,
        outside: Outside = "zero",
        filters: Filters = "exp",
        divide: bool = True,
        gate: Gate | None = "sigmoid",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.heads, self.kernel_size, self.ndim, self.reparam, self.init_std, self.outside = (
            heads,
            kernel_size,
            ndim,
            reparam,
            init_std,
            outside,
        )
        check_heads(self, heads)
        check_spread(self, init_std=init_std)
        if kernel_size < 1 or kernel_size % 2 == 0:
            self.refuse(f"kernel_size must be odd and positive, got {kernel_size!r}")
        if ndim not in (1, 2, 3) or (causal and ndim > 1):
            self.refuse(f"ndim must be 1, 2 or 3, and 1 with causal=True, got ndim={ndim!r}, causal={causal}")
        if outside not in OUTSIDES:
            self.refuse(f"outside must be 'zero' or 'none', got {outside!r}")
        one_of(self, FILTERS, filters=filters)
        if filters == "signed" and bias is not None:
            self.refuse(f"bias={bias!r} holds log-weights: it needs filters='exp', got 'signed'")
        self.gate, self.filters, self.divide = gate, filters, divide
        add_projections(self, key_width=heads, gate=gate, qkv_bias=qkv_bias, out_bias=out_bias)
        self.bias = build_distance_bias(self, bias, heads)
        if bias is not None and ndim > 1:
            self.refuse(f"bias={bias!r}: it needs ndim=1, got {ndim}")
        learned, scaled = bias is None, bias is None and reparam
        self.raw = nn.Parameter(torch.empty(heads, *[kernel_size] * ndim)) if learned else None
        self.gamma = nn.Parameter(torch.empty(heads)) if scaled else None
        self.beta = nn.Parameter(torch.empty(heads)) if scaled else None
        self.init_parameters()

    def narrow_capabilities(self, can):
        """Return the features of this instance: the causal form takes no grid, and grids do not stream."""
        return replace(can, grid=not self.causal)

    def waived(self):
        return {} if self.divide else dict(self.facts.waivers)

    def init_parameters(self) -> None:
        if self.raw is not None:
            nn.init.normal_(self.raw, std=1.0 if self.reparam else self.init_std)
        if self.gamma is not None and self.beta is not None:
            nn.init.zeros_(self.gamma)
            nn.init.constant_(self.beta, float(self.filters == "signed" and self.outside == "none"))

    def kernel(self, like: Tensor | None = None) -> Tensor:
        """Return the log-weights (h, s, ...) in use; with signed filters, the taps.

        Args:
            like: its dtype and device are those of taps that are computed from a bias; None: a weight of the mixer.
        """
        if self.raw is None:
            assert self.bias is not None
            size, x = self.kernel_size, next(self.out_proj.parameters()) if like is None else like
            return self.bias.taps(size - 1 if self.causal else size // 2, size, x.dtype, x.device)
        if self.gamma is None or self.beta is None:
            return self.raw
        flat = self.raw.flatten(1)
        centred = flat - flat.mean(1, keepdim=True)
        deviation = (centred.square().mean(1, keepdim=True) + 1e-10).sqrt() + 1e-5
        return (self.gamma[:, None] * centred / deviation + self.beta[:, None]).view_as(self.raw)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.aft_conv`` for this input: (positional, keyword)."""
        x, grid = inputs.x, inputs.grid
        if self.causal and grid is not None:
            self.refuse(f"was built with causal=True and mixes a sequence, got grid={grid}")
        if grid is None and self.ndim > 1:
            self.refuse(f"was built with ndim={self.ndim} and needs grid=, the {self.ndim} sizes of the token grid")
        if grid is not None and len(grid) != self.ndim:
            self.refuse(f"was built with ndim={self.ndim}, got grid={tuple(grid)}")
        args = queries(self, x), self.k_proj(x), self.v_proj(x), self.kernel(x)
        options: dict[str, Any] = {
            "grid": grid,
            "prefix": inputs.prefix,
            "outside": self.outside,
            "positions": inputs.positions,
        }
        if self.filters != "exp" or not self.divide:
            options |= {"filters": self.filters, "divide": self.divide}
        return args, {**options, "causal": self.causal, "key_mask": inputs.key_mask, "gate": self.gate}

    def mixing_cost(self, T: int) -> MixingCost:
        D, h, ring = self.dim, self.heads, self.kernel_size - 1
        flops = 2 * (self.kernel_size**self.ndim + 1) * T * (D + h)
        plain = self.filters == "signed" or not self.divide and self.outside == "none"  # sums without exponentials
        kept = 60 * T * D + (240 * h * T if self.ndim == 1 else 16 * h * T * T)  # grids: dense pairs
        kept = kept // 2 if plain and self.ndim == 1 else kept
        if self.ndim > 1 and self.outside == "zero":
            kept = T * (32 * D + 35 * h)
        return MixingCost(
            flops=flops, counted=None, activations=kept, state=ring * (4 * D + 4 * h + 9) + 8 * (D + 2 * h) + 8
        )

    def empty_state(self, batch_size, *, device, dtype):
        return empty_ring(batch_size, self.kernel_size - 1, self.heads, self.dim, device=device, dtype=dtype)

    @property
    def halo(self):
        return self.kernel_size - 1 if self.outside == "none" else 0

    @property
    def only_halo(self):
        return self.outside == "none"

    def join_states(self, earlier, later, fade):
        options = {"heads": self.heads, "divide": self.divide}
        return join_ring_states(earlier, later, only_near=self.outside == "none", **options)

    def mix_chunk(self, x, state, *, positions, key_mask):
        return ring_chunk(self, x, state, positions=positions, key_mask=key_mask)

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        w, near, key_positions = chunk.tap_weights(self.kernel(x), positions, state.positions)
        return ring_step(
            self,
            x,
            state,
            positions,
            key_positions,
            valid,
            w,
            near,
            only_near=self.outside == "none",
            filters=self.filters,
            divide=self.divide,
            heads=self.heads,
            holes=holes,
        )
