"""Pooling (PoolFormer, Yu et al. 2022, arXiv:2111.11418) as a layer without parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from ..functional.pooling import mean_of_pairs, windows
from ..functional.sums.taps import silenced
from .base import About, Arguments
from .cost import MixingCost
from .parts.history import joined, newest, ring_bytes
from .parts.options import at_least, one_of, true_or_false
from .parts.unprojected import Unprojected
from .parts.window import WindowMixer


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

    supports_causal = supports_streaming = supports_grid = True
    supports_segments = True
    about = About("Yu et al. 2022, arXiv 2111.11418", "pooling", "T s D", "0")
    form = "pooling"
    waivers = {
        "accurate_on_adversarial_keys": "the difference cancels; float32 errors scale with the tokens (test_pooling.py)"
    }

    def __init__(self, dim: int, *, causal: bool = False, window: int = 3, subtract: bool = True, ndim: int = 1):
        super().__init__(dim, causal=causal)
        self.window, self.subtract, self.ndim = window, subtract, ndim
        at_least(self, 1, window=window)
        one_of(self, (1, 2), ndim=ndim)
        true_or_false(self, subtract=subtract)
        if window % 2 == 0 and not causal:
            self.refuse(f"window must be positive, and odd unless causal=True, got {window!r}")
        if causal and ndim > 1:
            self.refuse(f"ndim must be 1 or 2, and 1 with causal=True, got ndim={ndim!r}, causal={causal}")
        self.out_proj = Unprojected()

    @property
    def capabilities(self):
        """Return the features of this instance: it takes a grid if ndim is 2."""
        base = super().capabilities
        return type(base)(**{**vars(base), "grid": self.ndim > 1})

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
        """Return the arguments of ``functional.pooling`` for this input: (positional, keyword)."""
        if (0 if grid is None else len(grid)) != (0 if self.ndim == 1 else self.ndim):
            need = "a grid (H, W) is needed" if self.ndim > 1 else "it mixes a sequence"
            self.refuse(f"was built with ndim={self.ndim}, got grid={grid}; {need}")
        if prefix:
            self.refuse(f"pools the cells of a grid and takes no tokens outside of it, got prefix={prefix}")
        options = {"window": self.window, "subtract": self.subtract, "grid": grid, "positions": positions}
        return (x,), {**options, "causal": self.causal, "key_mask": key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        return MixingCost(self.ndim * T * self.window * self.dim, None, 0, ring_bytes(self.halo, self.dim))

    @property
    def halo(self):
        return self.window - 1

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        state = joined(state, valid, positions, values=x)
        v = silenced(state.values.to(torch.promote_types(x.dtype, state.values.dtype)), state.valid)
        y = mean_of_pairs(
            windows(positions, state.positions, self.window, causal=True), v, state.valid[..., None].to(v.dtype)
        )
        if self.subtract:
            y = y - v[:, state.values.shape[1] - x.shape[1] :]
        return y.to(x.dtype), newest(state, self.halo, holes=holes)
