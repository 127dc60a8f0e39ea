"""Positions on a grid of patches: tables resized in two dimensions, and fixed sinusoids for any size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError


def resize_rows(table: Tensor, old: tuple[int, int], new: tuple[int, int], prefix: int) -> Tensor:
    """Resize a table of one row per token, (prefix + H W, D), to another grid.

    The prefix rows stay as they are; the others are interpolated as an image, bicubically with antialiasing, as DINOv2
    and timm resize position embeddings.
    """
    if table.shape[0] != prefix + old[0] * old[1]:
        grid = f"a grid of {old[0]} x {old[1]} with {prefix} tokens before it"
        raise MixerError(f"resize: a table of {table.shape[0]} rows does not belong to {grid}.")
    image = table[prefix:].T.reshape(1, -1, *old).float()
    grown = F.interpolate(image, size=new, mode="bicubic", align_corners=False, antialias=True)[0]
    return torch.cat([table[:prefix], grown.flatten(1).T.to(table.dtype)])


def replacing_parameter(table: Tensor, values: Tensor) -> nn.Parameter:
    """Return values of another shape as a parameter that replaces ``table``.

    It is trained or frozen as before, with the same dtype and attributes. It is a new object, because autograd holds
    the old one to its shape as long as any result computed from it lives; optimisers must be recreated.
    """
    new = nn.Parameter(values.detach().to(table.dtype).contiguous(), requires_grad=table.requires_grad)
    vars(new).update(vars(table))
    return new


def sincos(grid: tuple[int, int], dim: int, *, device: torch.device | None = None) -> Tensor:
    """Compute fixed sinusoids (H W, dim) as in MoCo v3 and MAE (He et al. 2022, arXiv 2111.06377).

    Half the features encode the row, half the column, each with sines and cosines of dim / 4 frequencies
    10000^(-4 i / dim). In one dimension this is Vaswani et al. 2017, Sec. 3.5.
    """
    if dim % 4:
        raise MixerError(f"sinusoidal positions on a grid need dim divisible by 4, got {dim}.")
    rate = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64, device=device) / (dim // 4))
    waves = [torch.arange(n, dtype=torch.float64, device=device)[:, None] * rate for n in grid]
    rows, columns = (torch.cat([w.sin(), w.cos()], 1) for w in waves)
    both = torch.cat([rows[:, None].expand(-1, grid[1], -1), columns[None].expand(grid[0], -1, -1)], -1)
    return both.flatten(0, 1).float()
