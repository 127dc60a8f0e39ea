"""AFT-conv (Zhai et al. 2021, Eq. 6) in one, two and three dimensions; the causal form exists in one dimension."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from ..errors import MixerError
from ..kernels.backend import Backend, choose, is_exporting, lowers
from ..kernels.operator import Operator
from ..kernels.precision import exact
from ..types import Options
from .layout.checks import check_flags, check_key_mask
from .sums.band import aft_band, band_sums, causal_sums, window_ratio
from .sums.filtered import cap_keys, factors_of, finish_sums, literal_factors, over_factors, plain_sums, tap_sums
from .sums.gates import Gate, apply_gate, check_gate
from .sums.grid import grid_sums
from .sums.nonfinite import over_pairs, over_window
from .sums.softmax import Sums, hidden_sums, kernel_sums, literal, merge_heads, over_visible, ratio_of, split_heads64
from .sums.weights import Dense, Toeplitz
from .sums.window import FILTERS, OUTSIDES, Filters, Outside

Pairs = tuple[Tensor, Tensor, Tensor]
"""What ``_dense_weights`` returns."""


@exact
def aft_conv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    *,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    outside: Outside = "zero",
    filters: Filters = "exp",
    divide: bool = True,
    causal: bool = False,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    gate: Gate | None = "sigmoid",
    backend: Backend = "auto",
) -> Tensor:
    """Compute AFT-conv (AFT, Eq. 6).

    y_t = gate(q_t) * sum_s exp(k_s^i + w^i_{s-t}) v_s / sum_s exp(k_s^i + w^i_{s-t}) in head i, with w = 0 outside the
    kernel. The paper writes it as conv(exp(k) v, exp(w) - 1) + sum exp(k) v, which cancels for large w; the sums here
    have positive terms only. Takes time O(T s D) in 1-D and O(T s^n D) on a grid of n axes; with positions, and on
    grids with ``outside="none"``, O(T^2 D), where the dense form runs.

    Args:
        q, v: (B, T, D); channel c belongs to head c // (D / h).
        k: (B, T, h), one key per head.
        kernel: log-weights (h, s), (h, s, s) or (h, s, s, s), s odd. Tap j weighs position t + j - s // 2
            (cross-correlation, torch's convention); when causal (1-D only), tap j weighs position t - (s - 1) + j.
        grid: (H, W) or (D, H, W) of the tokens after the first ``prefix``; 1-D needs none.
        prefix: number of leading tokens that are not on the grid; their log-weight to and from every token is 0.
        outside: "zero": keys outside the kernel have weight exp(0); "none": they are not attended.
        filters: "exp": the factor of exp(k_s) is exp(w), and 1 outside; "signed", a method of its own: it is 1 + w, and
            1 outside (with ``outside="none"``: w, and 0 outside), in the numerator only. The denominator is then the
            sum of exp(k_s) over the keys attended, which cannot vanish.
        divide: False leaves the denominator out. Keys above 300 then count as 300, and outputs may exceed their dtype.
        causal: keep only keys s <= t.
        key_mask: bool (B, T), True = may be attended.
        positions: (B, T) indices into the prefix followed by the flattened grid, for tokens dropped or moved.
        gate: function applied to q; None for no gate.
        backend: how to run; see ``choose``.

    Returns:
        (B, T, D) in q's dtype; exactly 0 where a query has nothing to attend to.

    Raises:
        MixerError: shapes, dtypes or options do not fit, or the requested backend cannot run this call.
    """
    _check(q, k, v, kernel, grid, outside, causal, key_mask, gate, filters, divide)
    _check_places(q.shape[1], grid, prefix, positions)
    if 0 in q.shape:
        return torch.zeros_like(q)
    plain = filters == "exp" and divide
    asked, on = q if gate == "sigmoid" else None, (aft_band if kernel.ndim == 2 else conv2d_kernel).on
    where = choose(
        "aft_conv", backend, k, v, asked, lacks=_missing_kernel(kernel, prefix, positions, outside, plain), on=on
    )
    if where != "eager":
        run = _runner(kernel, q.shape[1], grid, prefix, key_mask, causal)
        return kernel_sums(where, run, q, k, v, gate, causal=causal, key_mask=key_mask)
    cells = grid or (q.shape[1] - prefix,)
    return _mix_in_float64(q, k, v, kernel, cells, prefix, outside, filters, divide, causal, key_mask, positions, gate)


def _mix_in_float64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    grid: tuple[int, ...],
    prefix: int,
    outside: Outside,
    filters: Filters,
    divide: bool,
    causal: bool,
    key_mask: Tensor | None,
    positions: Tensor | None,
    gate: Gate | None,
) -> Tensor:
    """Compute the result by sums in float64: over a window, over a grid, or over all pairs."""
    size, plain, ordered = kernel.shape[-1], filters == "exp" and divide, positions is None
    windowed = kernel.ndim == 2 and not prefix and ordered
    gridded = not windowed and ordered and outside == "zero" and not causal
    gridded = gridded and not is_exporting()  # onnxruntime convolves no float64
    reach = (1 - size, 0) if causal else (-(size // 2), size // 2)
    pairs = None if windowed or gridded else _dense_weights(kernel, grid, prefix, positions, causal, q.device)

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kd, vd = split_heads64(k, v, key_mask, kernel.shape[0])
        if gridded:
            signed = filters == "signed"
            y = finish_sums(grid_sums(cap_keys(kd, divide), vd, kernel, grid, prefix, signed=signed), divide)
        elif plain:
            y = _mix_ratio(kd, vd, kernel, reach, pairs, outside, key_mask, causal)
        else:
            given = kernel, reach, pairs, outside, causal, filters, divide
            y = finish_sums(_factored_sums(cap_keys(kd, divide), vd, *given), divide)
        return apply_gate(q, merge_heads(y), gate)

    met = (lambda mark: over_window(mark, *reach)) if pairs is None else (lambda mark: over_pairs(pairs[1][:, 0], mark))
    return hidden_sums(form, q, k, v, gate, causal=causal, key_mask=key_mask, reach=met if outside == "none" else None)


def _dense_weights(
    kernel: Tensor, grid: tuple[int, ...], prefix: int, positions: Tensor | None, causal: bool, device: torch.device
) -> Pairs:
    """Return the log-weights of all pairs, the pairs inside the kernel, with those of prefix tokens, and without them.

    The log-weights are (1 or B, h, T, T), the pairs bool (1 or B, 1, T, T).
    """
    size = kernel.shape[-1]
    place = torch.arange(prefix + prod(grid), device=device)[None] if positions is None else positions
    cells, on_grid = _cells(place - prefix, grid), place >= prefix
    offset = cells[:, None] - cells[:, :, None] + (size - 1 if causal else size // 2)  # (1 or B, T, T, axes)
    both = on_grid[:, :, None] & on_grid[:, None, :]
    inside = both & ((offset >= 0) & (offset < size)).all(-1)
    tap = offset.clamp(0, size - 1)
    w = torch.where(
        inside, kernel.double().permute(*range(1, kernel.ndim), 0)[tuple(tap.unbind(-1))].movedim(-1, 0), 0.0
    ).transpose(0, 1)
    pairs = inside | ~both
    if causal:
        pairs = pairs & torch.ones(both.shape[1:], dtype=torch.bool, device=device).tril()
    return w, pairs[:, None], inside[:, None]


def _mix_ratio(
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    reach: tuple[int, int],
    pairs: Pairs | None,
    outside: Outside,
    key_mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """Compute the paper's ratio; without ``pairs`` over a sequence without prefix and positions."""
    if pairs is None:
        taps = Toeplitz(kernel, -reach[0])
        if outside == "none":
            return window_ratio(k, v, taps, reach=reach)
        return ratio_of((causal_sums if causal else band_sums)(k, v, taps, reach=reach))
    w, inside, _ = pairs
    if outside == "none":
        return literal(k, v, w, inside if key_mask is None else inside & key_mask[:, None, None])
    return ratio_of(causal_sums(k, v, Dense(w)) if causal else over_visible(k, v, w))


def _factored_sums(
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    reach: tuple[int, int],
    pairs: Pairs | None,
    outside: Outside,
    causal: bool,
    filters: Filters,
    divide: bool,
) -> Sums:
    """Compute the sums with signed filters, or for a numerator alone; arguments as in ``_mix_ratio``."""
    signed, everywhere = filters == "signed", outside == "zero"
    if pairs is None and (signed or not everywhere):
        return tap_sums(k, v, factors_of(kernel, signed), reach[0], everywhere=everywhere, causal=causal)
    if pairs is None:
        return (causal_sums if causal else band_sums)(k, v, Toeplitz(kernel, -reach[0]), reach=reach)
    w, inside, window = pairs
    c = factors_of(w, signed)
    if signed:  # prefix tokens have the factor 1
        c = c + 1.0 if everywhere else torch.where(window, c, 1.0)
    seen = None if everywhere else inside
    if everywhere and causal:
        seen = torch.ones(c.shape[-2:], dtype=torch.bool, device=c.device).tril()
    if not divide:
        return plain_sums(k, v, c if seen is None else c.masked_fill(~seen, 0.0))
    return over_factors(k, v, c) if seen is None else literal_factors(k, v, c, seen)


def _cells(flat: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Return the grid cell (..., axes) of each flat index; prefix tokens get an arbitrary cell.

    Cells are looked up in a table, because inductor fails on indices computed with // and %.
    """
    if len(grid) == 1:
        return flat[..., None]
    axes = torch.meshgrid(*(torch.arange(n, device=flat.device) for n in grid), indexing="ij")
    return torch.stack(axes, -1).flatten(0, -2)[flat.clamp_min(0)]


def _taps(kernel: Tensor, T: int, causal: bool) -> Tensor:
    """Return the kernel (h, s) as a band (1, h, 1, s) for T rows, without taps that reach no token."""
    if lowers():
        return kernel[None, :, None].float()
    beyond = max(0, kernel.shape[-1] - T if causal else kernel.shape[-1] // 2 - (T - 1))
    return kernel[None, :, None, beyond : kernel.shape[-1] - (0 if causal else beyond)].float()


def _runner(
    kernel: Tensor, T: int, grid: tuple[int, ...] | None, prefix: int, key_mask: Tensor | None, causal: bool
) -> Callable[[Tensor | None, Tensor, Tensor], Tensor]:
    """Return the operator for the number of dimensions of ``kernel``, as a function of q, k and v."""
    if kernel.ndim == 2:
        taps = _taps(kernel, T, causal)
        return lambda q, k, v: aft_band(q, k, v, taps, key_mask, causal)
    assert grid is not None
    sizes = grid
    return lambda q, k, v: conv2d_kernel(q, k, v, kernel, key_mask, list(sizes), prefix)


def _missing_kernel(kernel: Tensor, prefix: int, positions: Tensor | None, outside: Outside, plain: bool) -> str | None:
    """Return why no kernel supports these options, as a phrase, or None if one does."""
    if not plain:
        return "its kernels take only filters='exp' with divide=True"
    if positions is not None or outside != "zero":
        return "its kernels take no positions and only outside='zero'"
    if kernel.ndim == 2 and prefix:
        return "its 1-D kernel takes no prefix"
    return "it has no 3-D kernel" if kernel.ndim == 4 else None


def _check_places(T: int, grid: tuple[int, ...] | None, prefix: int, positions: Tensor | None) -> None:
    """Refuse a prefix and a grid that do not add up to T tokens: a kernel would read and write out of bounds."""
    sizes = () if grid is None else grid
    if not all(isinstance(n, (int, torch.SymInt)) and not isinstance(n, bool) and n >= 0 for n in (prefix, *sizes)):
        raise MixerError(f"aft_conv: grid and prefix must be integers >= 0, got grid={grid!r}, prefix={prefix!r}.")
    tokens = prefix + prod(sizes) if sizes else max(prefix, T)
    if positions is None and tokens != T:
        raise MixerError(f"aft_conv: grid={grid} with prefix={prefix} means {tokens} tokens, got {T}.")
    if 0 in sizes and T:
        raise MixerError(f"aft_conv: grid={grid} has no cells beside prefix={prefix}; every size must be at least 1.")


def _run_eager(
    q: Tensor | None, k: Tensor, v: Tensor, kernel: Tensor, key_mask: Tensor | None, grid: list[int], prefix: int
) -> Tensor:
    options: Options = {
        "grid": tuple(grid),
        "prefix": prefix,
        "key_mask": key_mask,
        "gate": None if q is None else "sigmoid",
        "backend": "eager",
    }
    return aft_conv(v if q is None else q, k, v, kernel, **options)


conv2d_kernel = Operator(
    "aft_conv2d",
    "q?(B,T,D) k(B,T,h) v(B,T,D) kernel(h,s,s):float key_mask?!(B,T):bool",
    "SymInt[] grid, SymInt prefix",
    saves=("saved",),
    keeps_result=True,
    shape=lambda q, k, v, kernel, key_mask, *, grid, prefix: v.shape,
    eager=_run_eager,
    fits=lambda at, given: (
        at["h"] > 0
        and at["D"] % at["h"] == 0
        and at["s"] % 2 == 1
        and len(given["grid"]) == 2
        and min(*given["grid"], given["prefix"]) >= 0
        and given["prefix"] + prod(given["grid"]) == at["T"]
    ),
    on=("cpu",),
)
"""Compute AFT-conv on a 2-D grid, (B, T, D): sigmoid(q) times the ratio of sums, or the ratio alone if q is None."""


def _check(q, k, v, kernel, grid, outside, causal, key_mask, gate, filters, divide) -> None:
    check_gate(gate, "aft_conv")
    check_flags("aft_conv", causal=causal, divide=divide)
    if filters not in FILTERS:
        raise MixerError(f"aft_conv: filters={filters!r}; choose 'exp' or 'signed'.")
    B, T, D = q.shape
    h, s, n = kernel.shape[0], kernel.shape[-1], kernel.ndim - 1
    if n not in (1, 2, 3) or s % 2 == 0 or any(a != s for a in kernel.shape[1:]):
        raise MixerError(
            f"aft_conv: kernel must be (h, s), (h, s, s) or (h, s, s, s) with s odd, got {tuple(kernel.shape)}."
        )
    if v.shape != q.shape or k.shape != (B, T, h) or D % h:
        raise MixerError(
            f"aft_conv: expects q and v {(B, T, D)} and k {(B, T, h)} with h dividing D, "
            f"got v {tuple(v.shape)}, k {tuple(k.shape)}."
        )
    if causal and n > 1:
        raise MixerError(f"aft_conv: causal=True exists in 1-D only, got a {n}-D kernel.")
    if n > 1 and (grid is None or len(grid) != n):
        raise MixerError(f"aft_conv: a {n}-D kernel needs a grid of {n} sizes, got grid={grid}.")
    if grid is not None and len(grid) != n:
        raise MixerError(f"aft_conv: a {n}-D kernel takes a grid of {n} sizes, got grid={grid}.")
    if outside not in OUTSIDES:
        raise MixerError(f"aft_conv: outside={outside!r}; choose 'zero' or 'none'.")
    check_key_mask("aft_conv", key_mask, q)
