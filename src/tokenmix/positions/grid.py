"""Positions on a grid of patches: tables resized in two dimensions, and fixed sinusoids for any size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import MixerError


def resize_rows(table: Tensor, old: tuple[int, int], new: tuple[int, int], prefix: int) -> Tensor:
    """A table of one row per token, (prefix + H W, D), for another grid: the prefix rows as they are, the others interpolated as an image.

    Bicubic with antialiasing, as DINOv2 and timm resize position embeddings.
    """
    if table.shape[0] != prefix + old[0] * old[1]:
        raise MixerError(f"resize: a table of {table.shape[0]} rows does not belong to a grid of {old[0]} x {old[1]} with {prefix} tokens before it.")
    image = table[prefix:].T.reshape(1, -1, *old).float()
    grown = nn.functional.interpolate(image, size=new, mode="bicubic", align_corners=False, antialias=True)[0]
    return torch.cat([table[:prefix], grown.flatten(1).T.to(table.dtype)])


def regrown(table: Tensor, values: Tensor) -> nn.Parameter:
    """Values of another shape as the parameter in the place of ``table``: trained or frozen, of the dtype and with the attributes it had.

    A new object, since autograd holds the old one to its shape as long as any result computed from it lives; an optimiser is made again.
    """
    new = nn.Parameter(values.detach().to(table.dtype).contiguous(), requires_grad=table.requires_grad)
    vars(new).update(vars(table))
    return new


def sincos(grid: tuple[int, int], dim: int, *, device: torch.device | None = None) -> Tensor:
    """Fixed sinusoids (H W, dim): half the features encode the row, half the column, each with sines and cosines of dim / 4 frequencies 10000^(-4 i / dim).

    As in MoCo v3 and MAE (He et al. 2022, arXiv 2111.06377), in one dimension Vaswani et al. 2017, Sec. 3.5.
    """
    if dim % 4:
        raise MixerError(f"sinusoidal positions on a grid need dim divisible by 4, got {dim}.")
    rate = 10000.0 ** (-torch.arange(dim // 4, dtype=torch.float64, device=device) / (dim // 4))
    waves = [torch.arange(n, dtype=torch.float64, device=device)[:, None] * rate for n in grid]
    rows, columns = (torch.cat([w.sin(), w.cos()], 1) for w in waves)
    both = torch.cat([rows[:, None].expand(-1, grid[1], -1), columns[None].expand(grid[0], -1, -1)], -1)
    return both.flatten(0, 1).float()
