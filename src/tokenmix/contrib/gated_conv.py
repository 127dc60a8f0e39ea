"""LFM2's gated short convolution (Liquid AI 2025, arXiv 2511.23404): most layers of the small hybrids run on CPUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.layout.masks import zero_masked
from ..functional.short_conv import short_conv, short_conv_chunk
from ..functional.sums.nonfinite import propagate_nonfinite
from ..kernels.backend import Backend, choose
from ..kernels.precision import at_least_float32, exact
from ..mixers.base import About, Arguments, Facts, Inputs
from ..mixers.cost import MixingCost
from ..mixers.parts.history import ring_bytes
from ..mixers.parts.options import at_least
from .parts.window import WindowMixer


@exact
def gated_conv(
    x: Tensor,
    weight: Tensor,
    z: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = z_t (sum_j weight_j x_{t + j - (s - 1)} + bias), feature by feature.

    Args:
        x: (B, T, D).
        weight: (D, s), the last tap at the token itself.
        z: (B, T, D), the gate, as it is.
        bias: (D,).
        causal: True; there is no other form here.
        key_mask: bool (B, T), False = the token counts as 0, and its output is 0.
        positions: (B, T); distances are measured in positions. Without them every token stands at its index.
        backend: how to run; see ``choose``.

    Returns:
        (B, T, D) in x's dtype. A tap that falls on no token adds 0.

    Raises:
        MixerError: shapes or options do not fit.
    """
    if causal is not True:
        raise MixerError(f"gated_conv: has only a causal form, got causal={causal!r}.")
    choose("gated_conv", backend, x, z)
    y = short_conv(x, weight, causal=True, key_mask=key_mask, positions=positions)
    return open_gate(y, z, bias, key_mask)


def open_gate(y: Tensor, z: Tensor, bias: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Compute z (y + bias); 0 at masked tokens."""

    def form(y: Tensor, z: Tensor) -> Tensor:
        wide = at_least_float32(y) if bias is None else at_least_float32(y) + bias
        return zero_masked(wide * z, key_mask).to(y.dtype)

    return propagate_nonfinite(form, None, y, z, key_mask=key_mask, each=True, reach=lambda mark: mark)


class GatedConv(WindowMixer):
    """y_t = W_o [c_t * (conv(b * x)_t)] with (b, c, x) = W_i u: a gate before and a gate after a few taps per feature.

    The short convolution of LFM2 (Liquid AI 2025, arXiv 2511.23404). Maps (B, T, D) to (B, T, D).

    Args:
        kernel_size: taps of the convolution, the identity at the start. Default 3.
        conv_bias: whether the convolution has a bias. Default False.
        qkv_bias, out_bias: biases of in_proj and out_proj; False by default, as in LFM2.

    Parameters: in_proj (dim -> 3 dim), kernel (dim x s), conv_bias (dim), out_proj. Time O(T s D). The streaming state
    is a ring of s - 1 tokens. A masked token counts as 0 and keeps its place.

    Deviations: public models start the convolution at random.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal_only=True,
        streaming=True,
        knows_positions=True,
        form=gated_conv,
        about=About(
            "Liquid AI 2025, arXiv 2511.23404",
            "convolution",
            "T s D",
            "T D",
            idea="a few taps between two gates, as in LFM2",
        ),
        signed=True,
        page="recurrence",
    )
    conv_bias: Tensor | None

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = True,
        kernel_size: int = 3,
        conv_bias: bool = False,
        qkv_bias: bool = False,
        out_bias: bool = False,
    ):
        super().__init__(dim, causal=causal)
        at_least(self, 1, kernel_size=kernel_size)
        self.kernel_size = kernel_size
        self.in_proj = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.kernel = nn.Parameter(torch.empty(dim, kernel_size))
        self.register_parameter("conv_bias", nn.Parameter(torch.empty(dim)) if conv_bias else None)
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)
        self.init_parameters()

    def init_parameters(self) -> None:
        with torch.no_grad():
            self.kernel.zero_()
            self.kernel[:, -1] = 1.0
            if self.conv_bias is not None:
                self.conv_bias.zero_()

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, c, x = self.in_proj(x).chunk(3, -1)
        return b * x, c

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``gated_conv`` for this input: (positional, keyword)."""
        mixed, z = self._project(inputs.x)
        options = {"causal": True, "key_mask": inputs.key_mask, "positions": inputs.positions}
        return (mixed, self.kernel, z, self.conv_bias), options

    def mixing_cost(self, T: int) -> MixingCost:
        flops = 2 * T * self.kernel_size * self.dim
        return MixingCost(flops, None, 28 * T * self.dim, ring_bytes(self.halo, self.dim))

    @property
    def halo(self):
        return self.kernel_size - 1

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        mixed, z = self._project(x)
        past = state.values, state.valid, state.positions
        y, (values, there, at) = short_conv_chunk(mixed, self.kernel, valid, positions, past, holes=holes)
        state = state._replace(values=values, valid=there, positions=at)
        return open_gate(y, z, self.conv_bias, valid), state
