"""Lightweight and dynamic convolution (Wu et al. 2019): a softmax over a short window's taps, shared by channels."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact
from .sums.nonfinite import honest, over_pairs, over_window
from .sums.taps import centre_of, check_odd, depthwise, pair_weights, silenced, slide, weighed


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
        v = silenced(x, key_mask)
        taps = (kernel if static else windows.unflatten(-1, kernel.shape[2:])).double().softmax(-1).to(v.dtype)
        if positions is None and static:
            return depthwise(taps, v, centre).to(x.dtype)
        heads = v.unflatten(-1, (kernel.shape[-2], -1))
        taps = taps[None, None] if static else taps
        if positions is None:
            y = slide(taps, heads, centre)
        else:
            y = weighed(pair_weights(taps, positions, positions, centre, causal=causal), heads)
        return y.flatten(2).to(x.dtype)

    def met(mark: Tensor) -> Tensor:
        if positions is None:
            return over_window(mark, -centre, size - 1 - centre)
        return over_pairs(
            pair_weights(mark.new_ones(1, 1, 1, size), positions, positions, centre, causal=causal)[:, 0] > 0, mark
        )

    if static:
        return honest(partial(form, kernel), None, x, key_mask=key_mask, reach=met)
    return honest(form, kernel.flatten(2), x, key_mask=key_mask, reach=met)


def _check(x: Tensor, kernel: Tensor, causal: bool, backend: Backend) -> None:
    choose("lightconv", backend, x)
    B, T, D = x.shape
    if kernel.ndim not in (2, 4) or (kernel.ndim == 4 and kernel.shape[:2] != (B, T)) or D % kernel.shape[-2]:
        raise MixerError(
            f"lightconv: kernel must be (H, s) or {(B, T)} + (H, s) with H dividing {D}, got {tuple(kernel.shape)}."
        )
    check_odd("lightconv", kernel.shape[-1], causal)
