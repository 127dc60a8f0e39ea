"""The learned bias w_ts of AFT-full and AFT-local: a table of pairs, or two factors."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...positions.grid import regrown, resize_rows
from ..base import token_positions
from .hands_out import HandsOut


class PairBias(HandsOut):
    """w = weight (rows, cols), or u v^T with u (rows, rank), v (cols, rank); entries ~ N(0, init_std).

    ``empty``: w = 0 and no parameters. ``owner``: in whose name it refuses. Its tensors are read through a call of it, so that hooks see that.
    """

    u: Tensor
    v: Tensor

    def __init__(self, rows: int, cols: int, *, rank: int | None, init_std: float, empty: bool = False, owner: str = "PairBias"):
        super().__init__()
        self.rank, self.init_std, self.owner = rank, init_std, owner
        if rank is not None and (not isinstance(rank, int) or not rank >= 1):
            raise MixerError(f"rank must be a positive integer, or None for a plain table of {rows} x {cols}, got {rank!r}.")
        if empty:
            self.rank = 0
            self.register_buffer("u", torch.empty(rows, 0), persistent=False)
            self.register_buffer("v", torch.empty(cols, 0), persistent=False)
        elif rank is None:
            self.weight = nn.Parameter(torch.empty(rows, cols))
        else:
            self.u, self.v = nn.Parameter(torch.empty(rows, rank)), nn.Parameter(torch.empty(cols, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the entries again."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=self.init_std)

    def between(self, x: Tensor, context: Tensor | None, positions: Tensor | None, key_mask: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
        """The bias for x over itself or a context: unbatched where every row stands at its index, which is cheapest."""
        if positions is None and key_mask is None:
            return self._leading(x.shape[1], x.shape[1] if context is None else context.shape[1], x.device)
        return self.select(*self.positions_of(x, context, positions, key_mask))

    def positions_of(self, x: Tensor, context: Tensor | None, positions: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Where queries (B, T) and keys (B, S) stand."""
        if context is None:
            rows = token_positions(x, key_mask) if positions is None else positions
            return rows, rows
        return token_positions(x, None) if positions is None else positions, token_positions(context, key_mask)

    def _leading(self, T: int, S: int, device: torch.device) -> Tensor | tuple[Tensor, Tensor]:
        u, v = self.on(device)
        return u[:T, :S] if v is None else (u[:T], v[:S])

    def select(self, rows: Tensor, cols: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The bias for positions (B, T) over positions (B, S): (B, T, S), or factors (B, T, r) and (B, S, r)."""
        u, v = self.on(rows.device)
        return u[rows[:, :, None], cols[:, None, :]] if v is None else (nn.functional.embedding(rows, u), nn.functional.embedding(cols, v))

    def table(self, rows: Tensor, cols: Tensor) -> Tensor:
        """The same as one float64 tensor (B, T, S)."""
        w = self.select(rows, cols)
        return w[0].double() @ w[1].double().transpose(-1, -2) if isinstance(w, tuple) else w.double()

    def handed(self) -> tuple[Tensor, Tensor | None]:
        """The factors, or the table and None."""
        return (self.weight, None) if self.rank is None else (self.u, self.v)

    def on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The same through a call that hooks see; refused where they are on another device."""
        u, v = self()
        for a in (u, v):
            if a is not None and a.device != device:
                raise MixerError(f"{self.owner}: has its bias on {a.device} and x on {device}; move one to the other.")
        return u, v

    def resize(self, rows: int, cols: int) -> None:
        """Interpolate linearly, so that position i moves to i * new / old."""
        if min(rows, cols) < 1:
            raise MixerError(f"resize needs positive lengths, got {rows} and {cols}.")
        with torch.no_grad():
            if self.rank is None:
                self.weight = regrown(self.weight, _stretched(_stretched(self.weight, rows).T, cols).T)
            elif self.rank == 0:
                self.u, self.v = self.u.new_empty(rows, 0), self.v.new_empty(cols, 0)
            else:
                self.u = regrown(self.u, _stretched(self.u, rows))
                self.v = regrown(self.v, _stretched(self.v, cols))

    def resize_grid(self, old: tuple[int, int], new: tuple[int, int], prefix: int) -> None:
        """Interpolate as an image each: positions are ``prefix`` tokens, which stay, then a grid of ``old`` sizes, row by row, which gets ``new`` ones."""
        with torch.no_grad():
            if self.rank is None:
                self.weight = regrown(self.weight, resize_rows(resize_rows(self.weight, old, new, prefix).T, old, new, prefix).T)
            elif self.rank == 0:
                self.resize(prefix + prod(new), prefix + prod(new))
            else:
                self.u, self.v = (regrown(table, resize_rows(table, old, new, prefix)) for table in (self.u, self.v))


def _stretched(table: Tensor, length: int) -> Tensor:
    return nn.functional.interpolate(table.T[None], size=length, mode="linear", align_corners=False)[0].T.contiguous()
