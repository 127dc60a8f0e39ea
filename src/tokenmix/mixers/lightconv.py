"""Lightweight and dynamic convolution (Wu et al. 2019, arXiv:1901.10430) as layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional.sums.taps import centre_of, pair_weights, silenced, weighed
from .base import About, Arguments
from .cost import MixingCost
from .parts.history import joined, newest, ring_bytes
from .parts.options import at_least, check_heads, true_or_false
from .parts.window import WindowMixer


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

    supports_causal = supports_streaming = True
    supports_segments = True
    knows_positions = True
    form = "lightconv"
    about = About("Wu et al. 2019, arXiv 1901.10430", "convolution", "T s D", "T D")
    signed = True

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

    def functional_args(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
    ) -> Arguments:
        """Return the arguments of ``functional.lightconv`` for this input: (positional, keyword)."""
        return (values(self, x), self.kernel), {"positions": positions, "causal": self.causal, "key_mask": key_mask}

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

    supports_causal = supports_streaming = True
    supports_segments = True
    knows_positions = True
    form = "lightconv"
    about = About("Wu et al. 2019, arXiv 1901.10430", "convolution", "T s D", "T D + T s H")
    signed = True

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

    def functional_args(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
    ) -> Arguments:
        """Return the arguments of ``functional.lightconv`` for this input: (positional, keyword)."""
        g = values(self, x)
        return (g, self._windows(g)), {"positions": positions, "causal": self.causal, "key_mask": key_mask}

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
    true_or_false(mixer, glu=mixer.glu)
    if size % 2 == 0 and not mixer.causal:
        mixer.refuse(f"kernel_size must be positive, and odd unless causal=True, got {size!r}")


def values(mixer: LightConv | DynamicConv, x: Tensor) -> Tensor:
    """Return the values to be convolved: the projected input, in the paper's form gated by half of itself."""
    g = mixer.v_proj(x)
    return F.glu(g, -1) if mixer.glu else g


def window_step(mixer, g, kernel, state, positions, valid, holes):
    """Convolve new values g (B, L, D) with windows ``kernel`` over the ring and each other."""
    state = joined(state, valid, positions, values=g)
    v = silenced(state.values.to(torch.promote_types(g.dtype, state.values.dtype)), state.valid)
    taps = kernel.double().softmax(-1).to(v.dtype)
    weights = pair_weights(taps, positions, state.positions, centre_of(mixer.kernel_size, True), causal=True)
    y = weighed(weights, v.unflatten(-1, (mixer.heads, -1))).flatten(2)
    return y.to(g.dtype), newest(state, mixer.halo, holes=holes)
