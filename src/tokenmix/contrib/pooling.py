"""Pooling (PoolFormer, Yu et al. 2022, arXiv:2111.11418): the mean of a window, minus the token itself."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MixerError
from ..functional.sums.nonfinite import clean, marks, over_pairs
from ..functional.sums.taps import centre_of, check_odd, pair_weights, zero_masked_values
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact
from ..mixers.base import About, Arguments, Facts, Inputs
from ..mixers.cost import MixingCost
from ..mixers.parts.history import append_tokens, keep_newest, ring_bytes
from ..mixers.parts.options import at_least, one_of
from .parts.unprojected import Unprojected
from .parts.window import WindowMixer


@exact
def pooling(
    x: Tensor,
    *,
    window: int,
    subtract: bool = True,
    grid: tuple[int, ...] | None = None,
    causal: bool = False,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y_t = mean of x_s over the valid tokens of the window around t, minus x_t (Yu et al. 2022, Eq. 4).

    Args:
        x: (B, T, D).
        window: tokens with |s - t| <= (window - 1) / 2, window odd; causal: t - window + 1 .. t, any window. On a grid,
            window x window cells.
        subtract: subtract x_t, because the block adds it again.
        grid: (H, W); tokens are its cells row by row.
        positions: (B, T) positions, or flat indices into the grid.

    Returns:
        (B, T, D) in x's dtype; 0 where the window holds no valid token. Time O(T window D), on a grid twice that; with
        positions O(T^2 D).
    """
    choose("pooling", backend, x)
    check_odd("pooling", window, causal)
    if grid is not None and (len(grid) != 2 or causal):
        raise MixerError(f"pooling: expects a grid (H, W) and causal=False, got grid={tuple(grid)}, causal={causal}.")
    v = zero_masked_values(x, key_mask)
    valid = torch.ones_like(v[..., :1]) if key_mask is None else key_mask[..., None].to(v.dtype)
    if positions is not None:
        mean = mean_of_pairs(windows(positions, positions, window, grid, causal=causal), v, valid)
    else:
        total = torch.cat([v, valid], -1)
        total = _box(total, window, 1, causal) if grid is None else _box_grid(total, window, grid)
        mean = total[..., :-1] / total[..., -1:].clamp_min(1.0)
    return (mean - v if subtract else mean).to(x.dtype)


def windows(rows: Tensor, cols: Tensor, window: int, grid: tuple[int, ...] | None = None, *, causal: bool) -> Tensor:
    """Return which keys at cols (B, S) lie in the window of queries at rows (B, T).

    (B, T, S) of ones and zeros, float32.
    """
    ones = torch.ones(1, 1, 1, window, dtype=torch.float32, device=rows.device)
    if grid is None:
        return pair_weights(ones, rows, cols, centre_of(window, causal), causal=causal)[:, 0]
    axes = torch.meshgrid(*(torch.arange(n, device=rows.device) for n in grid), indexing="ij")
    near = [
        pair_weights(ones, line.flatten()[rows], line.flatten()[cols], window // 2, causal=False)[:, 0] for line in axes
    ]
    return near[0] * near[1]


def mean_of_pairs(inside: Tensor, v: Tensor, valid: Tensor) -> Tensor:
    """Compute the mean of v (B, S, D) over the valid tokens (B, S, 1) inside."""
    inside = inside.to(v.dtype)
    return (inside @ clean(v)) / (inside @ valid).clamp_min(1.0) + over_pairs(inside != 0, marks(v)).to(v.dtype)


def _box(v: Tensor, window: int, axis: int, causal: bool) -> Tensor:
    """Sum over a window along one axis by shifted additions, where nothing cancels, unlike in running sums."""
    n, centre = v.shape[axis], centre_of(window, causal)
    padded = F.pad(v, (0, 0) * (v.ndim - 1 - axis) + (centre, window - 1 - centre))
    total = padded.narrow(axis, 0, n)
    for j in range(1, window):
        total = total + padded.narrow(axis, j, n)
    return total


def _box_grid(v: Tensor, window: int, grid: tuple[int, ...]) -> Tensor:
    return _box(_box(v.unflatten(1, grid), window, 1, False), window, 2, False).flatten(1, 2)


class Pooling(WindowMixer):
    """PoolFormer: y_t = mean of the valid tokens in the window around t, minus x_t.

    Yu et al. 2022, arXiv:2111.11418, Eq. 4. Maps (B, T, D) to (B, T, D).

    Args:
        window: tokens in the window, odd, 3 by default; the last ``window`` tokens, any number, when causal; window x
            window cells with ndim=2.
        subtract: True (default, the paper's): subtract x_t, because the block adds it again.
        ndim: 1 (default) for sequences; 2, the paper's form, for grids whose size is given at call time.

    As in the paper there are no parameters and no projections; norm and residual belong to the block. Time O(T s D) for
    a window of s tokens. The streaming state is a ring of the last window - 1 tokens.

    Deviations: the one-dimensional and the causal form are ours.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        grid=True,
        about=About("Yu et al. 2022, arXiv 2111.11418", "pooling", "T s D", "0"),
        form=pooling,
        waivers={
            "accurate_on_adversarial_keys": "the difference cancels; "
            "float32 errors scale with the tokens (test_pooling.py)"
        },
    )

    def __init__(self, dim: int, *, causal: bool = False, window: int = 3, subtract: bool = True, ndim: int = 1):
        super().__init__(dim, causal=causal)
        self.window, self.subtract, self.ndim = window, subtract, ndim
        at_least(self, 1, window=window)
        one_of(self, (1, 2), ndim=ndim)
        if window % 2 == 0 and not causal:
            self.refuse(f"window must be positive, and odd unless causal=True, got {window!r}")
        if causal and ndim > 1:
            self.refuse(f"ndim must be 1 or 2, and 1 with causal=True, got ndim={ndim!r}, causal={causal}")
        self.out_proj = Unprojected()

    def narrow_capabilities(self, can):
        """Return the features of this instance; it takes a grid if ndim is 2."""
        return replace(can, grid=self.ndim > 1)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``pooling`` for this input: (positional, keyword)."""
        grid, prefix = inputs.grid, inputs.prefix
        if (0 if grid is None else len(grid)) != (0 if self.ndim == 1 else self.ndim):
            need = "a grid (H, W) is needed" if self.ndim > 1 else "it mixes a sequence"
            self.refuse(f"was built with ndim={self.ndim}, got grid={grid}; {need}")
        if prefix:
            self.refuse(f"pools the cells of a grid and takes no tokens outside of it, got prefix={prefix}")
        options = {"window": self.window, "subtract": self.subtract, "grid": grid, "positions": inputs.positions}
        return (inputs.x,), {**options, "causal": self.causal, "key_mask": inputs.key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        return MixingCost(self.ndim * T * self.window * self.dim, None, 0, ring_bytes(self.halo, self.dim))

    @property
    def halo(self):
        return self.window - 1

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        state = append_tokens(state, valid, positions, values=x)
        v = zero_masked_values(state.values.to(torch.promote_types(x.dtype, state.values.dtype)), state.valid)
        y = mean_of_pairs(
            windows(positions, state.positions, self.window, causal=True), v, state.valid[..., None].to(v.dtype)
        )
        if self.subtract:
            y = y - v[:, state.values.shape[1] - x.shape[1] :]
        return y.to(x.dtype), keep_newest(state, self.halo, holes=holes)
