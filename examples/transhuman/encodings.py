"""Encodings of places and directions by sines and cosines, as NeRF's."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def encode(places: Tensor, frequencies: int, *, raw: bool, pi: bool) -> Tensor:
    """Return sin and cos of 2^k x (times pi if wanted) for k < ``frequencies``, after x itself where ``raw``.

    Computed in float64 where angles grow beyond float32's digits.

    Args:
        places: (..., 3).

    Returns:
        (..., 3 raw + 6 frequencies).
    """
    scale = 2.0 ** torch.arange(frequencies, dtype=torch.float64, device=places.device) * (math.pi if pi else 1.0)
    wide = places.double() if frequencies > 12 else places
    angles = wide[..., None, :] * scale.to(wide)[:, None]
    found = torch.cat([angles.sin(), angles.cos()], -1).flatten(-2).to(places)
    return torch.cat([places, found], -1) if raw else found
