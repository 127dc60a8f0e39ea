"""Checks of the inputs that every mixer runs before it mixes: shapes, dtypes, devices, positions."""

from __future__ import annotations

from math import prod
from typing import NoReturn

import torch
from torch import Tensor

from ..kernels.recording import recorder
from ..positions.checks import check_exact, extremes
from .facts import HasFacts
from .traced import hold_grid, hold_length, is_traced


def describe(a: Tensor) -> str:
    """Return dtype and shape of a tensor for an error message."""
    return f"{a.dtype} {tuple(a.shape)}"


class InputChecks(HasFacts):
    """The input checks of ``Mixer``; each raises MixerError in the name of the mixer."""

    dim: int
    causal: bool
    max_len: int | None
    max_context_len: int | None

    def refuse(self, why: str) -> NoReturn:
        """Raise ``MixerError``; implemented by ``Mixer``."""
        raise NotImplementedError(why)

    def _check_devices(self, x: Tensor) -> None:
        """Refuse own parameters and buffers on another device than x.

        Products with a tensor on the meta device would return numbers instead of raising an error.
        """
        for own in (self._parameters, self._buffers):
            for name, a in own.items():
                if a is not None and a.device != x.device:
                    self.refuse(f"has {name} on {a.device} and x on {x.device}; move one to the other")

    def _check_input(self, x: Tensor, label: str) -> None:
        if x.ndim != 3 or x.shape[-1] != self.dim:
            self.refuse(f"expects {label} of shape (batch, time, {self.dim}), got {tuple(x.shape)}")
        if not x.is_floating_point():
            self.refuse(f"expects floating point {label}, got {x.dtype}")
        name, limit = ("max_len", self.max_len) if label == "x" else ("max_context_len", self.max_context_len)
        if limit is not None and x.shape[1] > limit:
            self.refuse(f"was built with {name}={limit}, got {label} of length {x.shape[1]}; shorten it or call resize")

    def _check_chunk(self, x: Tensor, positions: Tensor | None, key_mask: Tensor | None) -> None:
        """Check the inputs of a chunk of a stream, of one token or more."""
        if not self.facts.streaming:
            self.refuse("has no streaming form; call forward on the whole sequence")
        self._check_devices(x)
        self._check_input(x, "x")
        if x.shape[1] == 0:
            self.refuse("extend needs at least one token, got a chunk of length 0")
        if key_mask is not None:
            self._check_masks(x, x, key_mask, None)
        if positions is not None:
            self._check_positions(x, positions)

    def _check_context(self, x: Tensor, context: Tensor | None) -> None:
        if context is None:
            limit, T = self.max_context_len, x.shape[1]
            if (limit or T) < T:
                self.refuse(
                    f"was built with max_context_len={limit}, got x of length {T} as its own context; call resize"
                )
            return
        if not self.facts.context:
            self.refuse("mixes a sequence with itself and takes no context")
        if self.causal:
            self.refuse("was built with causal=True; a context has no order relative to x, build it with causal=False")
        self._check_input(context, "context")
        if context.shape[0] != x.shape[0]:
            self.refuse(f"expects a context of {x.shape[0]} rows like x, got shape {tuple(context.shape)}")
        self._check_beside(x, "context", context)

    def _check_beside(self, x: Tensor, what: str, a: Tensor) -> None:
        if a.device != x.device:
            self.refuse(f"expects {what} on {x.device}, where x is, got one on {a.device}")

    def _check_masks(self, x: Tensor, keys: Tensor, key_mask: Tensor | None, attn_mask: Tensor | None) -> None:
        B, T, S = x.shape[0], x.shape[1], keys.shape[1]
        if key_mask is not None:
            if key_mask.dtype != torch.bool or key_mask.shape != (B, S):
                self.refuse(
                    f"expects a bool key_mask of shape {(B, S)}, True = may be attended, got {describe(key_mask)}"
                )
            self._check_beside(x, "key_mask", key_mask)
        if attn_mask is None:
            return
        self._check_beside(x, "attn_mask", attn_mask)
        if not self.facts.attn_mask:
            self.refuse("does not weight pairs of tokens and takes no attn_mask; use key_mask")
        if attn_mask.dtype != torch.bool or tuple(attn_mask.shape) not in ((T, S), (B, T, S)):
            self.refuse(
                f"expects a bool attn_mask {(T, S)} or {(B, T, S)}, True = may be attended, got {describe(attn_mask)}"
            )

    def _hold_lengths(
        self, x: Tensor, context: Tensor | None, grid: tuple[int, ...] | None
    ) -> tuple[Tensor, Tensor | None, tuple[int, ...] | None]:
        """Return x and the context such that a program of torch.jit.trace refuses lengths it has no numbers for.

        The grid is returned in integers, and the program refuses others.
        """
        if grid is not None:
            x, grid = hold_grid(x, grid, type(self).__name__)
        if not is_traced():
            return x, context, grid
        who, fixed = type(self).__name__, self.facts.has_fixed_length(self.causal)
        x = hold_length(x, who, limit=self.max_len, fixed=fixed or grid is not None)
        if context is None:
            return x, None, grid
        return x, hold_length(context, who, limit=self.max_context_len, fixed=fixed, name="max_context_len"), grid

    def _hold_chunk(self, x: Tensor) -> Tensor:
        """Return a chunk of a stream such that a program of torch.jit.trace refuses chunks of another length."""
        return hold_length(x, type(self).__name__, limit=None, fixed=True) if is_traced() else x

    def _check_grid(self, x: Tensor, positions: Tensor | None, grid: tuple[int, ...] | None, prefix: int) -> None:
        if grid is None:
            if prefix:
                self.refuse(f"got prefix={prefix} without a grid")
            return
        if not self.facts.grid:
            self.refuse(f"mixes a sequence and takes no grid, got grid={grid}")
        if prefix < 0 or any(n < 1 for n in grid):
            self.refuse(f"expects a grid of positive sizes and prefix >= 0, got grid={tuple(grid)}, prefix={prefix}")
        if positions is None and x.shape[1] != prefix + prod(grid):
            self.refuse(
                f"grid={tuple(grid)} with prefix={prefix} stands for {prefix + prod(grid)} tokens, got {x.shape[1]}"
            )

    def _check_positions(self, x: Tensor, positions: Tensor | None) -> None:
        if positions is None:
            return
        if positions.dtype not in (torch.int64, torch.int32) or positions.shape != x.shape[:2]:
            self.refuse(f"expects integer positions of shape {tuple(x.shape[:2])}, got {describe(positions)}")
        self._check_beside(x, "positions", positions)
        self.check_range(positions)

    def check_range(self, positions: Tensor, limit: int | None = None, why: str = "") -> None:
        """Refuse positions outside of 0..limit-1; the default limit is max_len, without which only 2^53 limits them.

        Values are read outside of compilation and export only.
        """
        limit = self.max_len if limit is None else limit
        if torch.compiler.is_compiling() or positions.numel() == 0 or limit is None and not positions.is_cpu:
            return
        if recorder() is not None:  # a decoder counts its tokens
            return
        if limit is None:
            check_exact(type(self).__name__, positions)
            return
        low, high = extremes(positions)
        if low < 0 or high >= limit:
            got = f"got positions from {low} to {high}"
            built = f"was built with max_len={self.max_len}, {got}; shorten the sequence or call resize"
            self.refuse(f"{why}, positions 0 to {limit - 1}, {got}" if why else built)

    def _check_packed(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        if x.ndim != 2 or x.shape[-1] != self.dim:
            self.refuse(f"expects packed x of shape (tokens, {self.dim}), got {tuple(x.shape)}")
        if cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32 or cu_seqlens.numel() < 1:
            self.refuse(f"expects cu_seqlens as a 1-D int32 tensor of cumulative lengths, got {describe(cu_seqlens)}")
        self._check_beside(x, "cu_seqlens", cu_seqlens)
        lengths = cu_seqlens.diff()
        if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != x.shape[0] or bool((lengths < 0).any()):
            self.refuse(f"expects cu_seqlens to rise from 0 to {x.shape[0]}, got {cu_seqlens.tolist()}")
        return lengths.long()
