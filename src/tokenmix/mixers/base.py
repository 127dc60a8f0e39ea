"""The contract every mixer keeps: checks first, then the mixer's own ``mix`` or ``mix_chunk``.

Shapes: B batch, T queries, S keys, L chunk length, D features. Masks are boolean, True = may be attended.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import MixerError
from .belonging import Kinds, checked_state, working_dtype
from .building import Checked
from .cost import Cost, MixingCost
from .facts import QKVO as QKVO
from .facts import About as About
from .facts import Kernels as Kernels
from .input_checks import InputChecks
from .parts.hands_out import HandsOut
from .state import State as State
from .state import chunk_positions as chunk_positions
from .state import register_state as register_state
from .state import token_positions as token_positions

_CONTEXT = object()  # in the place of a state: make one of a context
SHORT = 6  # packed sequences of up to two to this many tokens are alike


@dataclass(frozen=True)
class Capabilities:
    """What one built mixer can do; every field is proven both ways by the contract suite."""

    causal: bool
    streaming: bool
    context: bool
    attn_mask: bool
    grid: bool
    export: bool


class Mixer(InputChecks, metaclass=Checked):
    """A token mixer: (B, T, D) in, (B, T, D) out, standing where multi-head attention stands.

    Args:
        dim: number of features D.
        causal: query t attends keys 0..t only. Fixed here, because state and bias shapes depend on it.
        max_len: longest sequence where the mixer has parameters per position, else None.

    Raises:
        MixerError: on any input or option the mixer cannot honour; the message names what would work.
    """

    def __init__(self, dim: int, *, causal: bool = False, max_len: int | None = None):
        super().__init__()
        self.dim, self.causal, self.max_len = dim, causal, max_len
        self.max_context_len: int | None = max_len
        self.state_kinds = Kinds()
        if dim < 1:
            self.refuse(f"dim must be a positive integer, got {dim!r}")
        if max_len is not None and max_len < 1:
            self.refuse(f"max_len must be a positive integer, got {max_len!r}")
        if causal and not self.supports_causal:
            self.refuse("has no causal form; build it with causal=False")

    @property
    def capabilities(self) -> Capabilities:
        """What this instance can do: the class's best, narrowed by the options it was built with."""
        return Capabilities(
            causal=self.causal,
            streaming=self.supports_streaming and self.causal,
            context=self.supports_context and not self.causal,
            attn_mask=self.supports_attn_mask,
            grid=self.supports_grid,
            export=self.supports_export,
        )

    @property
    def keeps_context(self) -> bool:
        """Whether ``init_state(context=...)`` is there: keys and values of a context, or their sums, projected once for all queries to come."""
        return self.capabilities.context and self.supports_streaming

    def cost(self, T: int, batch: int = 1) -> Cost:
        """What one forward pass over (batch, T, dim) takes: FLOPs, parameters, bytes kept for backward, bytes of state after T tokens."""
        if not isinstance(T, int) or T < 1 or not isinstance(batch, int) or batch < 1:
            self.refuse(f"cost expects T and batch as positive integers, got T={T!r}, batch={batch!r}")
        if (self.max_len or T) < T:
            self.refuse(f"was built with max_len={self.max_len}, cost was asked for T={T}")
        mixing, each = self.mixing_cost(T), sum(p.numel() for p in self.parameters())
        state = mixing.state if self.capabilities.streaming else 0
        return Cost(batch * self.projection_flops(T), batch * mixing.flops, each, batch * mixing.activations, batch * state)

    def projection_flops(self, T: int) -> int:
        """FLOPs per row of the maps that act on each token alone; by default every Linear of the mixer, once per token."""
        return sum(2 * T * m.in_features * m.out_features for m in self.modules() if isinstance(m, nn.Linear))

    def mixing_cost(self, T: int) -> MixingCost:
        """What joining T tokens takes per row, beside the projections; what a mixer with a cost formula writes."""
        self.refuse("declares no cost; write mixing_cost(T)")

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        """The largest |logit| among arguments of the functional form, where logits are dot products: their rounding decides how exact float32 can be."""
        return 0.0

    def waived(self) -> dict[str, str]:
        """Return the promises that this instance cannot keep, with reasons: ``waivers``, narrowed by its options."""
        return dict(self.waivers)

    def refuse(self, why: str) -> NoReturn:
        """Raise the one error of the contract, in this mixer's name."""
        raise MixerError(f"{type(self).__name__}: {why}.")

    def reset_parameters(self) -> None:
        """Initialise again, drawing from the generator in the same order as construction does."""
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]  # every child of a mixer is a Linear or one of ours
        self.init_parameters()

    def init_parameters(self) -> None:
        """Initialise the parameters the mixer owns itself; called last by ``__init__`` and ``reset_parameters``."""

    def start_copies(self) -> None:
        """Make parameters that start as copies of others equal to them; whoever draws those others anew, as a model does, calls this after."""

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
        state: State = None,
    ) -> Tensor:
        """Mix x (B, T, D) with itself or with ``context`` (B, S, D).

        Args:
            positions: (B, T) integers, the position of each token of x. Default: index minus the index of the first True of the row's key mask; over a
                context, where the mask is the context's, the index.
            key_mask: (B, S) bool, True = this key may be attended.
            attn_mask: (T, S) or (B, T, S) bool, for mixers that weigh pairs; all masks are ANDed.
            grid: (H, W) or (D, H, W) of the tokens after the first ``prefix`` ones, for mixers on grids.
            prefix: leading tokens outside the grid (class token, registers).
            state: given by ``extend`` and ``init_state``, whose calls take this way too, so that hooks see them; they then return what those do.

        Returns:
            (B, T, D). A query with nothing to attend gives ``out_proj(0)``; outputs at masked positions are finite.
        """
        if state is not None:
            return self._stream(x, state, positions, key_mask)  # type: ignore[return-value]  # for extend and init_state alone
        self._check_devices(x)
        self._check_input(x, "x")
        self._check_context(x, context)
        self._check_masks(x, x if context is None else context, key_mask, attn_mask)
        self._check_grid(x, positions, grid, prefix)
        self._check_positions(x, positions)
        if grid is not None and positions is not None:
            self.check_range(positions, prefix + prod(grid), f"was given grid={tuple(grid)} and prefix={prefix}")
        return self.mix(x, context, positions=positions, key_mask=key_mask, attn_mask=attn_mask, grid=grid, prefix=prefix)

    def forward_packed(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Mix sequences stored end to end: x (N, D), cu_seqlens int32 (n + 1,) from 0 to N. Positions restart in each.

        Sequences of like lengths are mixed together, padded to the longest of them: at most twice the tokens. Not for export or full graphs: how many
        calls this makes depends on the lengths.
        """
        lengths = self._check_packed(x, cu_seqlens)
        if x.shape[0] == 0:
            return self(x[None])[0]
        mixed, indices = zip(*(self._mix_group(x, cu_seqlens[which], lengths[which]) for which in _length_groups(lengths)), strict=True)
        return torch.cat(mixed)[torch.cat(indices).argsort()]

    def _mix_group(self, x: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of the packed sequences of these starts and lengths, and their places in x."""
        steps = torch.arange(int(lengths.max()), device=x.device)
        mask = steps < lengths[:, None]
        indices = (starts[:, None] + steps)[mask]
        padded = x.new_zeros(*mask.shape, self.dim)
        padded[mask] = x[indices]
        return self(padded, key_mask=None if bool(mask.all()) else mask)[mask], indices

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """The state before the first token; with ``context``, the context's projected keys and values (or their sums)."""
        if not self.supports_streaming:
            self.refuse("has no streaming form; call forward on the whole sequence")
        if context is None:
            if not self.causal:
                self.refuse("was built with causal=False; only causal mixers stream, or any mixer over a context given here")
            if device is None:
                weight = next(self.parameters(), next(self.buffers(), None))
                device = None if weight is None else weight.device
            return self.empty_state(batch_size, device=device, dtype=dtype or working_dtype(self) or torch.get_default_dtype())
        if context.ndim == 3 and context.shape[0] != batch_size:
            self.refuse(f"expects a context of {batch_size} rows, got shape {tuple(context.shape)}")
        return self(context, key_mask=context_mask, state=_CONTEXT)

    def extend(self, x: Tensor, state: State, *, positions: Tensor | None = None, key_mask: Tensor | None = None) -> tuple[Tensor, State]:
        """Mix the next L >= 1 tokens x (B, L, D) with everything before them. Returns the outputs and the new state.

        ``key_mask`` (B, L) marks padding in this chunk; ``positions`` (B, L) replaces the running counter for this chunk and those after it. A state in
        other floating point types than this mixer's is converted; a state of another mixer is refused.
        """
        if state is None:
            self.refuse("extend needs a state; start with init_state")
        return self(x, positions=positions, key_mask=key_mask, state=state)

    def _stream(self, x: Tensor, state: State, positions: Tensor | None, key_mask: Tensor | None) -> Any:
        """``extend``, or, of a context, the state that ``init_state`` gives."""
        if not self.supports_streaming:
            self.refuse("has no streaming form; call forward on the whole sequence")
        self._check_devices(x)
        if state is _CONTEXT:
            self._check_input(x, "context")
            self._check_context(x, x)
            self._check_masks(x, x, key_mask, None)
            return self.context_state(x, key_mask)
        self._check_input(x, "x")
        if x.shape[1] == 0:
            self.refuse("extend needs at least one token, got a chunk of length 0")
        if not self.causal and not self.supports_context:
            self.refuse("was built with causal=False and streams nothing; build it with causal=True")
        if not torch.compiler.is_compiling():
            state = checked_state(self, x, state)
        if not self.causal and key_mask is not None:
            self.refuse("over a context, the mask of the keys is given to init_state as context_mask")
        self._check_masks(x, x, key_mask, None)
        self._check_positions(x, positions)
        return self.mix_chunk(x, state, positions=positions, key_mask=key_mask)

    @abstractmethod
    def mix(
        self,
        x: Tensor,
        context: Tensor | None,
        *,
        positions: Tensor | None,
        key_mask: Tensor | None,
        attn_mask: Tensor | None,
        grid: tuple[int, ...] | None,
        prefix: int,
    ) -> Tensor:
        """What a new mixer writes: inputs are checked; ``context`` is None for self-mixing."""

    def mix_chunk(self, x: Tensor, state: State, *, positions: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, State]:
        """And this, if it streams."""
        raise NotImplementedError

    def empty_state(self, batch_size: int, *, device: Any, dtype: torch.dtype) -> State:
        """The state of a causal mixer that has seen nothing."""
        raise NotImplementedError

    def empty_context_state(self, batch_size: int, *, device: Any, dtype: torch.dtype) -> State:
        """The state over a context without tokens; like ``empty_state`` where nothing else is said."""
        return self.empty_state(batch_size, device=device, dtype=dtype)

    def state_lengths(self) -> dict[str, str]:
        """Of fields of the causal state that grow though they are not empty at first, or not with the tokens: what they grow with, along axis 1."""
        return {}

    def context_state(self, context: Tensor, context_mask: Tensor | None) -> State:
        """The state of a mixer whose keys and values all come from ``context``."""
        self.refuse("has no streaming form over a context; call forward(x, context)")

    def read(self, child: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        """The weights of a child as tensors. It hands them out when called without input, so that hooks, which may fetch them, see that call too."""
        given: Any = child() if isinstance(child, HandsOut) else (child.weight, child.bias)
        weights = tuple(a for a in given if a is not None)
        for a in weights:
            if a.device != x.device:
                self.refuse(f"has weights on {a.device} and x on {x.device}; move one to the other")
        return weights


def _length_groups(lengths: Tensor) -> Iterator[Tensor]:
    """Which sequences have some tokens, by the power of two that their length does not exceed."""
    sizes = torch.tensor([max((n - 1).bit_length(), SHORT) if n else -1 for n in lengths.tolist()])
    for size in sizes[sizes >= 0].unique():
        yield (sizes == size).nonzero()[:, 0].to(lengths.device)
