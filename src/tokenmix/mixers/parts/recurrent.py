"""What the layers with a gated recurrence share: a short convolution, the state of both, streams and segments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...functional.layout.masks import valid_mask
from ...kernels.precision import at_least_float32
from ..base import Arguments, Facts, Inputs, Kernels, register_state
from ..segments import Segmented
from .history import empty_window, ring_bytes
from .options import at_least
from .shared import ring_chunk
from .short_conv import ShortConv

STEPS = (1e-3, 1e-1, 1e-4)
"""Bounds of the steps dt at the start, log-uniform, and the least of them, as in Mamba-2 and all its descendants."""


@register_state
class RecurrentState(NamedTuple):
    """What the heads hold, and the last tokens before the convolution. Its size is constant.

    values (B, kernel_size - 1, C): what is convolved, before the convolution and its activation; valid (B, .) bool;
    positions (B, .). memory (B, H, K, V), in float32 or wider. position (B,): the next position.
    """

    values: Tensor
    valid: Tensor
    positions: Tensor
    memory: Tensor
    position: Tensor


class LowRank(nn.Module):
    """Two linear maps in a row, dim -> rank -> width, the second one with a bias if ``bias``."""

    def __init__(self, dim: int, rank: int, width: int, *, bias: bool = False):
        super().__init__()
        self.down, self.up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, width, bias=bias)

    def reset_parameters(self) -> None:
        """Initialise both maps again."""
        self.down.reset_parameters()
        self.up.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to (..., width)."""
        mapped: Tensor = self.up(self.down(x))
        return mapped


def start_steps(bias: Tensor) -> None:
    """Fill ``bias`` so that softplus(bias) is log-uniform between the bounds of ``STEPS``."""
    low, high, least = STEPS
    dt = torch.empty_like(bias, dtype=torch.float32).uniform_(0, 1)
    dt = (low * (high / low) ** dt).clamp_min(least)
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def log_decay(logits: Tensor, bias: Tensor, A_log: Tensor) -> Tensor:
    """Compute -exp(A_log) softplus(logits + bias), in float32 or wider; ``F.softplus`` has finite gradients."""
    return -at_least_float32(A_log).exp() * F.softplus(at_least_float32(logits) + at_least_float32(bias))


class Recurrent(Segmented):
    """Abstract base of layers that convolve a few tokens, then write and read one matrix per head.

    A subclass projects, says what its functional form takes, and names the form and that of a chunk.
    """

    facts = Facts(
        causal_only=True,
        streaming=True,
        knows_positions=True,
        signed=True,
        fixed_when_traced=True,  # a trace unrolls the loop over chunks
        conditioned={"norm": False},
        kernels=Kernels(("recurrence",)),
        waivers={
            "accurate_on_adversarial_keys": "signed sums cancel within a row; float32 errors scale with the largest "
            "output (test_gated_delta.py)"
        },
        page="recurrence",
    )
    chunk: ClassVar[Callable[..., tuple[Tensor, tuple[Tensor]]]]
    """The functional form for new tokens: takes the memory before them as ``past``, and returns that after them."""
    memory: tuple[int, int, int]
    """Heads, and features of a key and of a value: the shape of what one sequence holds."""

    def _set_up(self, width: int, kernel_size: int, *, bias: bool = False) -> None:
        """Add the convolution of ``width`` features."""
        at_least(self, 1, kernel_size=kernel_size)
        self.width, self.kernel_size = width, kernel_size
        self.conv = ShortConv(width, kernel_size, bias=bias) if kernel_size > 1 else None

    @abstractmethod
    def project(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return what is convolved (B, T, C), and whatever else ``arguments`` needs of x (B, T, D)."""

    @abstractmethod
    def arguments(self, mixed: Tensor, rest: Any) -> tuple[Tensor | None, ...]:
        """Return the arguments of the functional form, given the tokens after convolution and activation."""

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Return the options of the functional form, besides ``causal`` and ``key_mask``."""

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of the functional form for this input: (positional, keyword)."""
        raw, rest = self.project(inputs.x)
        if self.conv is not None:
            raw = self.conv(raw, positions=inputs.positions, key_mask=inputs.key_mask)
        options = {"causal": True, "key_mask": inputs.key_mask, **self.options()}
        return self.arguments(F.silu(raw), rest), options

    def state_size(self) -> int:
        """Return the bytes of the streaming state of one sequence."""
        H, K, V = self.memory
        return ring_bytes(self.kernel_size - 1, self.width) + 4 * H * K * V

    def empty_state(self, batch_size, *, device, dtype):
        ring = empty_window(batch_size, self.width, self.kernel_size - 1, device=device, dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        memory = torch.zeros(batch_size, *self.memory, device=device, dtype=wide)
        return RecurrentState(ring.values, ring.valid, ring.positions, memory, ring.position)

    def mix_chunk(self, x, state, *, positions, key_mask):
        return ring_chunk(self, x, state, positions=positions, key_mask=key_mask, pairs=False)

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        raw, rest = self.project(x)
        if self.conv is not None:
            raw, state = self.conv(raw, positions=positions, key_mask=valid, state=state, holes=holes)
        args = self.arguments(F.silu(raw), rest)
        y, after = type(self).chunk(*args, past=state.memory, key_mask=valid, **self.options())
        return y, state._replace(memory=after[0])

    @property
    def halo(self):
        return self.kernel_size - 1

    def state_from_halo(self, halo, empty):
        return self.mix_chunk(halo.x, empty, positions=halo.positions, key_mask=halo.valid)[1]._replace(
            memory=empty.memory
        )

    def own_ring(self, state: RecurrentState, valid: Tensor) -> RecurrentState:
        """Return the state with those tokens of the ring alone that are the stretch's; the rest are the halo."""
        behind = state.valid.flip(1).cumsum(1).flip(1)
        return state._replace(valid=state.valid & (behind <= valid.sum(1, keepdim=True)))

    def state_of(self, x, empty, positions, key_mask):
        state = self.mix_chunk(x, empty, positions=positions, key_mask=key_mask)[1]
        return self.own_ring(state, valid_mask(x, key_mask))
