"""Fourier mixing (FNet, Lee-Thorp et al. 2021, arXiv:2105.03824) as a layer without parameters."""

from __future__ import annotations

from math import ceil, log2

from torch import Tensor

from .base import About, Arguments, Mixer
from .cost import MixingCost
from .parts.unprojected import Unprojected


class Fourier(Mixer):
    """FNet: y = Re(F_tokens(F_features(x))), discrete Fourier transforms without normalisation.

    Lee-Thorp et al. 2021, arXiv:2105.03824, Eq. 3. Maps (B, T, D) to (B, T, D). As in the paper there are no parameters
    and no projections; norm and residual belong to the block. The transform of a padded row has the length of that row
    without its padding. There is no causal form: each output depends on every token and on their number.

    Raises:
        MixerError: with ``causal=True``.
    """

    about = About(
        "Lee-Thorp et al. 2021, arXiv 2105.03824",
        "Fourier transform",
        "T D log(T D), with a mask T^2 D",
        "0, with a mask T^2",
    )
    knows_positions = True
    form = "fourier"
    waivers = {
        "accurate_on_adversarial_keys": "signed sums cancel; float32 errors scale with the input (test_fourier.py)"
    }

    def __init__(self, dim: int, *, causal: bool = False):
        super().__init__(dim, causal=causal)
        self.out_proj = Unprojected()

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
        """Return the arguments of ``functional.fourier`` for this input: (positional, keyword)."""
        return (x,), {"positions": positions, "causal": self.causal, "key_mask": key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        return MixingCost(5 * T * self.dim * ceil(log2(max(2, T * self.dim))), None, 0)
