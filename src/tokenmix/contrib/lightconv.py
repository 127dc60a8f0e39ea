"""Lightweight and dynamic convolution (Wu et al. 2019, arXiv:1901.10430).

A softmax over a short window's taps, shared by channels.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.sums.nonfinite import over_pairs, over_window, propagate_nonfinite
from ..functional.sums.taps import (
    centre_of,
    check_odd,
    depthwise,
    pair_weights,
    slide,
    weigh_values,
    zero_masked_values,
)
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact
from ..mixers.base import About, Arguments, Facts, Inputs
from ..mixers.cost import MixingCost
from ..mixers.parts.history import append_tokens, keep_newest, ring_bytes
from ..mixers.parts.options import at_least, check_heads
from .parts.window import WindowMixer


@exact
def lightconv(
    x: Tensor,
    kernel: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = sum_j softmax_j(kernel^h)_j x_{t + j - s // 2} in head h (Wu et al. 2019, Eq. 2 and 4).

    Causal: x_{t + j - (s - 1)}.

    Args:
        x: (B, T, D); channel c belongs to head c // (D / H).
        kernel: log-weights (H, s), the same at every token: lightweight convolution; or (B, T, H, s), computed from
            token t alone: dynamic convolution. s is odd unless causal.
        positions: (B, T); distances are measured in positions. Without them every token stands at its index.

    Returns:
        (B, T, D) in x's dtype. A tap that falls on no token, or on a masked one, adds 0: the softmax is over taps, not
        over tokens, as in the paper. Time O(T s D), memory O(T D + T H s); with explicit positions O(T^2 D).
    """
    _check(x, kernel, causal, backend)
    size, static = kernel.shape[-1], kernel.ndim == 2
    centre = centre_of(size, causal)

    def form(windows: Tensor, x: Tensor) -> Tensor:
        v = zero_masked_values(x, key_mask)
        taps = (kernel if static else windows.unflatten(-1, kernel.shape[2:])).double().softmax(-1).to(v.dtype)
        if positions is None and static:
            return depthwise(taps, v, centre).to(x.dtype)
        heads = v.unflatten(-1, (kernel.shape[-2], -1))
        taps = taps[None, None] if static else taps
        if positions is None:
            y = slide(taps, heads, centre)
        else:
            y = weigh_values(pair_weights(taps, positions, positions, centre, causal=causal), heads)
        return y.flatten(2).to(x.dtype)

    def mark_window(mark: Tensor) -> Tensor:
        if positions is None:
            return over_window(mark, -centre, size - 1 - centre)
        return over_pairs(
            pair_weights(mark.new_ones(1, 1, 1, size), positions, positions, centre, causal=causal)[:, 0] > 0, mark
        )

    if static:
        return propagate_nonfinite(partial(form, kernel), None, x, key_mask=key_mask, reach=mark_window)
    return propagate_nonfinite(form, kernel.flatten(2), x, key_mask=key_mask, reach=mark_window)


def _check(x: Tensor, kernel: Tensor, causal: bool, backend: Backend) -> None:
    choose("lightconv", backend, x)
    B, T, D = x.shape
    if kernel.ndim not in (2, 4) or (kernel.ndim == 4 and kernel.shape[:2] != (B, T)) or D % kernel.shape[-2]:
        raise MixerError(
            f"lightconv: kernel must be (H, s) or {(B, T)} + (H, s) with H dividing {D}, got {tuple(kernel.shape)}."
        )
    check_odd("lightconv", kernel.shape[-1], causal)


class LightConv(WindowMixer):
    """Lightweight convolution: y_t = W_o sum_j softmax_j(w^h)_j g_{t + j - s // 2} in head h, g = GLU(W_v x).

    Wu et al. 2019, arXiv:1901.10430, Eq. 2. Maps (B, T, D) to (B, T, D).

    Args:
        heads: H, 8 by default; must divide dim. The dim / H channels of a head share one window.
        kernel_size: s, the number of taps, 31 by default; odd. The causal form covers the last s tokens, for any s.
        glu: True (default, the paper's): g = a * sigmoid(b) with [a, b] = W_v x; False: g = W_v x.

    Parameters: v_proj, out_proj, kernel (H, s). Time O(T s D), memory O(T D). The streaming state is a ring of s - 1
    values.

    Deviations: the paper drops taps at random in training (DropConnect); this layer does not.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        knows_positions=True,
        form=lightconv,
        about=About("Wu et al. 2019, arXiv 1901.10430", "convolution", "T s D", "T D"),
        signed=True,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        kernel_size: int = 31,
        glu: bool = True,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.heads, self.kernel_size, self.glu = heads, kernel_size, glu
        check_window(self)
        self.v_proj = nn.Linear(dim, 2 * dim if glu else dim, bias=qkv_bias)
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)
        self.kernel = nn.Parameter(torch.empty(heads, kernel_size))
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.xavier_uniform_(self.kernel)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``lightconv`` for this input: (positional, keyword)."""
        return (values(self, inputs.x), self.kernel), {
            "positions": inputs.positions,
            "causal": self.causal,
            "key_mask": inputs.key_mask,
        }

    def mixing_cost(self, T: int) -> MixingCost:
        flops = 2 * T * self.kernel_size * self.dim
        return MixingCost(flops, flops, 4 * T * self.dim * (6 if self.glu else 3), ring_bytes(self.halo, self.dim))

    @property
    def halo(self):
        return self.kernel_size - 1

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        return window_step(self, values(self, x), self.kernel[None, None], state, positions, valid, holes)


class DynamicConv(WindowMixer):
    """Dynamic convolution: y_t = W_o sum_j softmax_j(W^h_q g_t)_j g_{t + j - s // 2} in head h.

    g = GLU(W_v x), and each token generates its own window. Wu et al. 2019, arXiv:1901.10430, Eq. 4. Maps (B, T, D) to
    (B, T, D).

    Args:
        heads, kernel_size, glu: as in LightConv.

    Parameters: q_proj (dim -> H s), v_proj, out_proj. Time O(T s D). The streaming state is a ring of s - 1 values.

    Deviations: the paper drops taps at random in training (DropConnect); this layer does not.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        knows_positions=True,
        form=lightconv,
        about=About("Wu et al. 2019, arXiv 1901.10430", "convolution", "T s D", "T D + T s H"),
        signed=True,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        kernel_size: int = 31,
        glu: bool = True,
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        self.heads, self.kernel_size, self.glu = heads, kernel_size, glu
        check_window(self)
        self.q_proj = nn.Linear(dim, heads * kernel_size, bias=qkv_bias)
        self.v_proj = nn.Linear(dim, 2 * dim if glu else dim, bias=qkv_bias)
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)

    def _windows(self, g: Tensor) -> Tensor:
        return self.q_proj(g).unflatten(-1, (self.heads, self.kernel_size))

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``lightconv`` for this input: (positional, keyword)."""
        g = values(self, inputs.x)
        return (g, self._windows(g)), {
            "positions": inputs.positions,
            "causal": self.causal,
            "key_mask": inputs.key_mask,
        }

    def mixing_cost(self, T: int) -> MixingCost:
        kept = 4 * T * (self.dim * (6 if self.glu else 3) + 5 * self.heads * self.kernel_size)
        return MixingCost(2 * T * self.kernel_size * self.dim, None, kept, ring_bytes(self.halo, self.dim))

    @property
    def halo(self):
        return self.kernel_size - 1

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        g = values(self, x)
        return window_step(self, g, self._windows(g), state, positions, valid, holes)


def check_window(mixer: LightConv | DynamicConv) -> None:
    """Refuse heads and kernel sizes that are out of their range."""
    size = mixer.kernel_size
    check_heads(mixer, mixer.heads)
    at_least(mixer, 1, kernel_size=size)
    if size % 2 == 0 and not mixer.causal:
        mixer.refuse(f"kernel_size must be positive, and odd unless causal=True, got {size!r}")


def values(mixer: LightConv | DynamicConv, x: Tensor) -> Tensor:
    """Return the values to be convolved: the projected input, in the paper's form gated by half of itself."""
    g = mixer.v_proj(x)
    return F.glu(g, -1) if mixer.glu else g


def window_step(mixer, g, kernel, state, positions, valid, holes):
    """Convolve new values g (B, L, D) with windows ``kernel`` over the ring and each other."""
    state = append_tokens(state, valid, positions, values=g)
    v = zero_masked_values(state.values.to(torch.promote_types(g.dtype, state.values.dtype)), state.valid)
    taps = kernel.double().softmax(-1).to(v.dtype)
    weights = pair_weights(taps, positions, state.positions, centre_of(mixer.kernel_size, True), causal=True)
    y = weigh_values(weights, v.unflatten(-1, (mixer.heads, -1))).flatten(2)
    return y.to(g.dtype), keep_newest(state, mixer.halo, holes=holes)
