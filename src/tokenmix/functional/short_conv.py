"""A short convolution along the tokens, feature by feature, as a part that precedes a mixer or follows its projections.

So in H3 (Fu et al. 2023, arXiv 2212.14052) and in the Canon layers of Allen-Zhu 2025 (arXiv 2512.17351).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import is_exporting, is_intercepted, masks, steps
from ..kernels.cpu import decode
from ..kernels.precision import exact
from .layout.positions import gather_tokens, last_valid
from .sums.nonfinite import over_pairs, over_window, propagate_nonfinite
from .sums.taps import centre_of, check_odd, depthwise, zero_masked_values

MANY = 16  # new tokens from which it pays to ask whether they stand in a row
Past = tuple[Tensor, Tensor, Tensor]


@exact
def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """Compute y_t = sum_j weight_j x_{t + j - s // 2}, feature by feature; causal: x_{t + j - (s - 1)}.

    Takes time and memory O(T s D); with explicit positions also O(T^2 s).

    Args:
        x: (B, T, D).
        weight: (D, s); s is odd unless causal.
        causal: use tokens up to t only.
        key_mask: bool (B, T), False = the token counts as 0.
        positions: (B, T); distances are measured in positions. Without them every token stands at its index.

    Returns:
        (B, T, D) in x's dtype. A tap that falls on no token adds 0.

    Raises:
        MixerError: shapes do not fit, or s is even without ``causal``.
    """
    if x.ndim != 3 or weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        raise MixerError(
            f"short_conv: expects x (B, T, D) and weight (D, s), got {tuple(x.shape)} and {tuple(weight.shape)}."
        )
    size = weight.shape[1]
    check_odd("short_conv", size, causal)
    centre = centre_of(size, causal)

    if positions is not None:
        return convolve_positions(
            zero_masked_values(x, key_mask), weight, positions, positions, centre, causal=causal
        ).to(x.dtype)

    def form(x: Tensor) -> Tensor:
        v = zero_masked_values(x, key_mask)
        return depthwise(weight.to(v.dtype), v, centre).to(x.dtype)

    def mark_window(mark: Tensor) -> Tensor:
        return over_window(mark, -centre, size - 1 - centre)

    return propagate_nonfinite(form, None, x, key_mask=key_mask, each=True, reach=mark_window)


def short_conv_chunk(
    x: Tensor, weight: Tensor, valid: Tensor, positions: Tensor, past: Past, *, holes: bool = False
) -> tuple[Tensor, Past]:
    """Compute the causal form for L new tokens after the last s - 1, and return these after the new ones.

    Args:
        x: (B, L, D).
        weight: (D, s).
        valid, positions: (B, L), of the new tokens; the others count as 0.
        past: the last s - 1 tokens (B, s - 1, D), whether they are valid, and their positions (B, s - 1).
        holes: whether masked tokens may follow valid ones; masked tokens then take up no room among the last.
    """
    x, weight, size = x.contiguous(), weight.to(x.dtype), weight.shape[1] - 1
    new = x, valid.contiguous(), positions.contiguous()
    (B, L, D), before, (values, there, at) = x.shape, (x.shape[0], size), past
    if (
        not holes
        and x.dtype is values.dtype
        and there.dtype is torch.bool
        and positions.dtype is at.dtype is torch.int64
        and x.is_cpu
        and valid.is_cpu
        and positions.is_cpu
        and weight.shape[0] == D
        and positions.shape == (B, L)
        and values.shape == (*before, D)
        and there.shape == at.shape == before
        and steps((x, weight), past)
        and masks(x, new[1])
    ):
        return decode.conv(weight, new, past)
    there, at = (torch.cat([a, b.to(a.dtype)], 1) for a, b in zip(past[1:], (valid, positions), strict=True))
    asks = x.shape[1] >= MANY and not is_intercepted() and not is_exporting()  # what the numbers are
    kept = None if asks and bool(valid.all()) else valid  # without a copy where nothing is masked
    v = torch.cat([zero_masked_values(past[0], past[1]), zero_masked_values(x, kept)], 1)
    centre = centre_of(weight.shape[1], True)
    if asks and not holes and in_a_row(there, at):
        y = propagate_nonfinite(
            lambda v: depthwise(weight.to(v.dtype), v, centre)[:, -x.shape[1] :],
            None,
            v,
            each=True,
            reach=lambda mark: over_window(mark, -centre, 0)[:, -x.shape[1] :],
        ).to(x.dtype)
    else:
        y = convolve_positions(v, weight, positions, at, centre, causal=True).to(x.dtype)
    if holes:
        index, there, _ = last_valid(there, size)
        return y, (gather_tokens(v, index).to(past[0].dtype), there, gather_tokens(at, index))
    values = torch.cat([past[0], x[:, -size:].to(past[0].dtype)], 1) if size else past[0]
    n = x.shape[1]
    return y, (values[:, values.shape[1] - size :], there[:, n:], at[:, n:])


def in_a_row(valid: Tensor, positions: Tensor) -> bool:
    """Return whether positions of the valid tokens (B, S) of each row are consecutive, like their indices."""
    start = positions - torch.arange(positions.shape[1], device=positions.device)
    first = torch.where(valid, start, torch.iinfo(start.dtype).max).amin(1)
    last = torch.where(valid, start, torch.iinfo(start.dtype).min).amax(1)
    return bool((first >= last).all())  # of a row without any, first is the largest number there is


def convolve_positions(v: Tensor, weight: Tensor, rows: Tensor, cols: Tensor, centre: int, *, causal: bool) -> Tensor:
    """Compute the convolution of tokens v (B, S, D) at positions cols (B, S) at the positions rows (B, T).

    Args:
        causal: the last T tokens are those of the rows, and a row sees none after its own.
    """
    taps = _taps(rows, cols, weight.shape[1], centre, causal=causal)

    def form(v: Tensor) -> Tensor:
        parts = [(near.to(v.dtype) @ v) * weight[:, j].to(v.dtype) for j, near in enumerate(taps)]
        return torch.stack(parts).sum(0)

    return propagate_nonfinite(form, None, v, each=True, reach=lambda mark: over_pairs(torch.stack(taps).any(0), mark))


def _taps(rows: Tensor, cols: Tensor, size: int, centre: int, *, causal: bool) -> list[Tensor]:
    """Return for each tap which token it falls on, from which row: bool (B, T, S)."""
    T, S = rows.shape[1], cols.shape[1]
    offset = cols[:, None] - rows[:, :, None] + centre
    seen = torch.ones(T, S, dtype=torch.bool, device=rows.device)
    seen = seen.tril(S - T) if causal else seen
    return [(offset == j) & seen for j in range(size)]
