"""The learned bias w_ts of AFT-full and AFT-local: a table over pairs of positions, or two factors."""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MixerError
from ...positions.grid import replacing_parameter, resize_rows
from ..base import token_positions
from .weights_on_call import WeightsOnCall


class PairBias(WeightsOnCall):
    """A bias per pair of positions: w = weight (rows, cols), or u v^T with u (rows, rank), v (cols, rank).

    Its tensors are read by calling it, so that module hooks see the call.

    Args:
        rows: number of query positions.
        cols: number of key positions.
        rank: None for a plain table.
        init_std: standard deviation of the entries of u and v, or of weight, at the start; their mean is 0.
        empty: w = 0, without parameters.
        owner: the name of the mixer in error messages.

    Raises:
        MixerError: if ``rank`` is neither None nor a positive integer.
    """

    u: Tensor
    v: Tensor

    def __init__(
        self, rows: int, cols: int, *, rank: int | None, init_std: float, empty: bool = False, owner: str = "PairBias"
    ):
        super().__init__()
        self.rank, self.init_std, self.owner = rank, init_std, owner
        if rank is not None and (not isinstance(rank, int) or not rank >= 1):
            raise MixerError(
                f"rank must be a positive integer, or None for a plain table of {rows} x {cols}, got {rank!r}."
            )
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

    def between(
        self, x: Tensor, context: Tensor | None, positions: Tensor | None, key_mask: Tensor | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the bias for x over itself or over a context.

        It has no batch axis where the positions of every row are the indices, which is cheapest.
        """
        if positions is None and key_mask is None:
            return self._leading_factors(x.shape[1], x.shape[1] if context is None else context.shape[1], x.device)
        return self.select(*pair_positions_of(x, context, positions, key_mask))

    def _leading_factors(self, T: int, S: int, device: torch.device) -> Tensor | tuple[Tensor, Tensor]:
        u, v = self.factors_on(device)
        return u[:T, :S] if v is None else (u[:T], v[:S])

    def select(self, rows: Tensor, cols: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the bias for query positions (B, T) and key positions (B, S).

        Returns:
            (B, T, S), or factors (B, T, r) and (B, S, r).
        """
        u, v = self.factors_on(rows.device)
        return u[rows[:, :, None], cols[:, None, :]] if v is None else (F.embedding(rows, u), F.embedding(cols, v))

    def table(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return the bias for query and key positions as one float64 tensor (B, T, S)."""
        w = self.select(rows, cols)
        return w[0].double() @ w[1].double().transpose(-1, -2) if isinstance(w, tuple) else w.double()

    def weights_on_call(self) -> tuple[Tensor, Tensor | None]:
        """Return the factors, or the table and None."""
        return (self.weight, None) if self.rank is None else (self.u, self.v)

    def factors_on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the same through a call, which hooks see; refuse tensors on another device."""
        u, v = self()
        if self.rank == 0:  # no numbers: a state dict that is assigned leaves these where the mixer was built
            u, v = (a.new_empty(a.shape, device=device) for a in (u, v))
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
                self.weight = replacing_parameter(
                    self.weight, _interpolate_table(_interpolate_table(self.weight, rows).T, cols).T
                )
            elif self.rank == 0:
                self.u, self.v = self.u.new_empty(rows, 0), self.v.new_empty(cols, 0)
            else:
                self.u = replacing_parameter(self.u, _interpolate_table(self.u, rows))
                self.v = replacing_parameter(self.v, _interpolate_table(self.v, cols))

    def resize_grid(self, old: tuple[int, int], new: tuple[int, int], prefix: int) -> None:
        """Interpolate rows and columns as images.

        Positions are ``prefix`` tokens, which stay, followed by a grid of size ``old``, row by row, which gets size
        ``new``.
        """
        with torch.no_grad():
            if self.rank is None:
                self.weight = replacing_parameter(
                    self.weight, resize_rows(resize_rows(self.weight, old, new, prefix).T, old, new, prefix).T
                )
            elif self.rank == 0:
                self.resize(prefix + prod(new), prefix + prod(new))
            else:
                self.u, self.v = (
                    replacing_parameter(table, resize_rows(table, old, new, prefix)) for table in (self.u, self.v)
                )


def pair_positions_of(
    x: Tensor, context: Tensor | None, positions: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the positions of queries (B, T) and of keys (B, S)."""
    if context is None:
        rows = token_positions(x, key_mask) if positions is None else positions
        return rows, rows
    return token_positions(x, None) if positions is None else positions, token_positions(context, key_mask)


def _interpolate_table(table: Tensor, length: int) -> Tensor:
    return F.interpolate(table.T[None], size=length, mode="linear", align_corners=False)[0].T.contiguous()
