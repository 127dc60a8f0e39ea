"""Fourier mixing (FNet, Lee-Thorp et al. 2021, arXiv:2105.03824): the real part of a 2-D discrete Fourier transform."""

from __future__ import annotations

from math import ceil, log2, pi

import torch
from torch import Tensor

from ..errors import MixerError
from ..functional.layout.masks import valid_mask
from ..functional.layout.positions import default_positions
from ..functional.sums.nonfinite import guard_nonfinite
from ..functional.sums.taps import zero_masked_values
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact
from ..mixers.base import About, Arguments, Facts, Inputs, Mixer
from ..mixers.cost import MixingCost
from .parts.unprojected import Unprojected


@exact
@guard_nonfinite("x")
def fourier(
    x: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    positions: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute y = Re(F_tokens(F_features(x))) (Lee-Thorp et al. 2021, Eq. 3).

    y_t = Re sum_s sum_d x_sd exp(-2 pi i (s t / L + d d' / D)).

    Args:
        x: (B, T, D).
        positions: (B, T), the s and t of the phases. Default: index minus the index of the row's first valid token.

    L is each row's own length, the position of its last valid token plus one, so that padding changes nothing. Without
    a mask or positions L = T, and the fast transform runs in O(T D log(T D)); otherwise, and on export, the cosines and
    sines are written out, in O(T^2 D + T D^2).

    Returns:
        (B, T, D) in x's dtype. There is no causal form: every output depends on every token and on how many there are.
    """
    choose("fourier", backend, x)
    if causal:
        raise MixerError(
            "fourier: there is no causal form, because every output depends on every token; use causal=False."
        )
    v = zero_masked_values(x, key_mask)
    if (
        key_mask is None
        and positions is None
        and v.numel()
        and not (torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export())
    ):
        return torch.fft.fft2(v).real.to(x.dtype)
    valid = valid_mask(x, key_mask)
    positions = default_positions(x.shape[0], x.shape[1], key_mask, x.device) if positions is None else positions
    cos_d, sin_d = _waves(
        torch.arange(x.shape[-1], device=x.device)[None], x.new_full((1,), x.shape[-1], dtype=torch.float64)
    )
    cos_t, sin_t = _waves(positions, _lengths(positions, valid))
    # the transform over features; the sign of the sine is left out here and below, which cancels
    real, imaginary = v @ cos_d.to(v.dtype), v @ sin_d.to(v.dtype)
    return (cos_t.to(v.dtype) @ real - sin_t.to(v.dtype) @ imaginary).to(x.dtype)


def _lengths(positions: Tensor, valid: Tensor) -> Tensor:
    """Return the position of each row's last valid token plus one, (B,) float64; 1 if there is none."""
    ends = torch.where(valid, positions + 1, 1).double()
    return ends.amax(1) if valid.shape[1] else ends.new_ones(valid.shape[0])


def _waves(positions: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of 2 pi s t / L, (B, T, T) float64; whole turns are removed first."""
    turns = positions[:, :, None].double() * positions[:, None, :].double() / length[:, None, None]
    angle = 2 * pi * (turns - turns.floor())
    return torch.cos(angle), torch.sin(angle)


class Fourier(Mixer):
    """FNet: y = Re(F_tokens(F_features(x))), discrete Fourier transforms without normalisation.

    Lee-Thorp et al. 2021, arXiv:2105.03824, Eq. 3. Maps (B, T, D) to (B, T, D). As in the paper there are no parameters
    and no projections; norm and residual belong to the block. The transform of a padded row has the length of that row
    without its padding. There is no causal form: each output depends on every token and on their number.

    Raises:
        MixerError: with ``causal=True``.
    """

    facts = Facts(
        about=About(
            "Lee-Thorp et al. 2021, arXiv 2105.03824",
            "Fourier transform",
            "T D log(T D), with a mask T^2 D",
            "0, with a mask T^2",
        ),
        knows_positions=True,
        form=fourier,
        waivers={
            "accurate_on_adversarial_keys": "signed sums cancel; float32 errors scale with the input (test_fourier.py)"
        },
    )

    def __init__(self, dim: int, *, causal: bool = False):
        super().__init__(dim, causal=causal)
        self.out_proj = Unprojected()

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``fourier`` for this input: (positional, keyword)."""
        return (inputs.x,), {"positions": inputs.positions, "causal": self.causal, "key_mask": inputs.key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        return MixingCost(5 * T * self.dim * ceil(log2(max(2, T * self.dim))), None, 0)
