"""What the decaying forms of AFT have in common: a short convolution, normalised keys, and the state of both."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from math import log
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...functional.aft_chunk import merge_faded
from ...functional.aft_forget import clamp_finite
from ...functional.layout.masks import valid_mask
from ...functional.layout.positions import position_gaps
from ...functional.sums.gates import Gate
from ...functional.sums.softmax import FLOOR
from ..base import QKVO, Arguments, Facts, Inputs, register_state, token_positions
from ..segments import Segmented
from .aft import add_projections
from .history import empty_window, join_rings, ring_bytes
from .options import at_least, check_positive
from .shared import check_positions, check_rising_after, ring_chunk
from .short_conv import ShortConv
from .token_norm import RMSNorm

EPS = 1e-6


@register_state
class ConvolvedState(NamedTuple):
    """Sums over all keys so far, in float64, and the last tokens before the convolution. Its size is constant.

    values (B, kernel_size - 1, 3 D): queries, keys and values before the convolution; valid (B, .) bool; positions
    (B, .). m, num, den (B, R, D), or (B, D) for one sum: the scale of each feature, the numerators, the denominators.
    last (B,): the position of the last valid token, where decays depend on distances. position (B,): the next position.
    """

    values: Tensor
    valid: Tensor
    positions: Tensor
    m: Tensor
    num: Tensor
    den: Tensor
    last: Tensor
    position: Tensor


class ConvolvedAFT(Segmented):
    """Abstract base of AFT with a short convolution on queries, keys and values, normalised keys, and decays.

    A subclass adds its parameters, and says with ``weights`` what its functional form takes after q, k and v.
    """

    facts = Facts(causal=True, streaming=True, knows_positions=True, carries=QKVO)
    chunk: ClassVar[Callable[..., Any]]
    """The functional form for new tokens: takes the sums before them after its arguments, and returns those after."""
    sums: tuple[int, ...] = ()
    """Shape of the sums of one feature: () for one sum."""
    by_distance = False
    """Whether the decays depend on distances in positions, which must then rise along the row."""

    def _set_up(
        self,
        *,
        kernel_size: int | None,
        key_norm: bool,
        gate: Gate | None,
        qkv_bias: bool,
        out_bias: bool,
    ) -> None:
        """Check the options in common and add their layers."""
        self.gate = gate
        self.kernel_size = (4 if self.causal else 3) if kernel_size is None else kernel_size
        at_least(self, 1, kernel_size=self.kernel_size)
        if self.kernel_size % 2 == 0 and not self.causal:
            self.refuse(f"kernel_size must be odd unless causal=True, got {kernel_size!r}")
        add_projections(self, key_width=self.dim, gate=gate, qkv_bias=qkv_bias, out_bias=out_bias)
        self.width = self.dim * (2 if gate is None else 3)
        self.conv = ShortConv(self.width, self.kernel_size, causal=self.causal) if self.kernel_size > 1 else None
        self.k_norm = RMSNorm(self.dim, eps=EPS) if key_norm else None

    def _pair(self, half_lives: Any) -> tuple[float, float]:
        """Return the half-lives as a pair; refuse anything else."""
        if not isinstance(half_lives, (tuple, list)) or len(half_lives) != 2:
            self.refuse(f"half_lives must be a pair, the shortest and the longest in tokens, got {half_lives!r}")
        for value in half_lives:
            check_positive(self, half_lives=value)
            if not 1e-3 <= value <= 1e300:  # of a shorter one the rate, log(exp(log(2) / value) - 1), overflows
                self.refuse(f"half_lives must lie between 0.001 and 1e300 tokens, got {value!r}")
        if half_lives[0] > half_lives[1]:
            self.refuse(f"half_lives must rise from the shortest to the longest, got {half_lives!r}")
        return half_lives[0], half_lives[1]

    @abstractmethod
    def weights(self, x: Tensor, gaps: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the arguments of the functional form after q, k and v.

        Args:
            x: (B, T, D).
            gaps: (B, T), positions since the valid token before; None: 1 for each token.
        """

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Return the options of the functional form, besides ``causal`` and ``key_mask``."""

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of the functional form for this input: (positional, keyword)."""
        x, positions, key_mask = inputs.x, inputs.positions, inputs.key_mask
        qkv = self._project_tokens(x)
        if self.conv is not None:
            qkv = self.conv(qkv, positions=positions, key_mask=key_mask)
        gaps = None
        if self.by_distance:
            check_positions(self, positions, key_mask, rising=True)
        if self.by_distance and (positions is not None or key_mask is not None):
            valid = valid_mask(x, key_mask)
            at = token_positions(x, key_mask) if positions is None else positions
            gaps = position_gaps(at, valid, at.new_zeros(at.shape[0]))[0]
        options = {"causal": self.causal, "key_mask": key_mask, **self.options()}
        return (*self._split(x, qkv), *self.weights(x, gaps)), options

    def _project_tokens(self, x: Tensor) -> Tensor:
        """Return queries, keys and values side by side (B, T, 3 D); 2 D without queries."""
        if self.gate is None:
            return torch.cat([self.k_proj(x), self.v_proj(x)], -1)
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)

    def _split(self, x: Tensor, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values; without a gate x in place of the queries, whose shape alone is used."""
        q, k, v = (x, *qkv.chunk(2, -1)) if self.gate is None else qkv.chunk(3, -1)
        return q, k if self.k_norm is None else self.k_norm(k), v

    def start_of(self, rate: Tensor, half_lives: tuple[float, float]) -> None:
        """Set rates so that log-decays -softplus(rate) have half-lives log-spaced over the last dimension."""
        short, long = (log(log(2.0) / life) for life in half_lives)
        with torch.no_grad():
            life = torch.linspace(short, long, rate.shape[-1], dtype=torch.float64, device=rate.device)
            rate.copy_(life.exp().expm1().log())

    def state_size(self) -> int:
        """Return the bytes of the streaming state of one sequence."""
        count = 1
        for n in self.sums:
            count *= n
        return ring_bytes(self.kernel_size - 1, self.width) + 24 * self.dim * count + 8

    def empty_state(self, batch_size, *, device, dtype):
        ring = empty_window(batch_size, self.width, self.kernel_size - 1, device=device, dtype=dtype)
        shape = (batch_size, *self.sums, self.dim)
        m, num, den = (torch.full(shape, a, device=device, dtype=torch.float64) for a in (FLOOR, 0.0, 0.0))
        position = ring.position
        return ConvolvedState(ring.values, ring.valid, ring.positions, m, num, den, position, position.clone())

    @property
    def halo(self):
        return self.kernel_size - 1

    def state_from_halo(self, halo, empty):
        ring = self.mix_chunk(halo.x, empty, positions=halo.positions, key_mask=halo.valid)[1]
        return ring._replace(m=empty.m, num=empty.num, den=empty.den, last=empty.last)

    def state_of(self, x, empty, positions, key_mask):
        state = self.mix_chunk(x, empty, positions=positions, key_mask=key_mask)[1]
        own = valid_mask(x, key_mask).sum(
            1, keepdim=True
        )  # the rest of the ring is the halo, which is not the stretch's
        return state._replace(valid=state.valid & (state.valid.flip(1).cumsum(1).flip(1) <= own))

    def fades(self, x, valid):
        one = x.new_zeros(x.shape[0], 1, self.dim)
        g = self.weights(one if self.by_distance else x, None)[-1]
        if g is None:
            return x.new_zeros(x.shape[0], *self.sums, self.dim, dtype=torch.float64), None
        mask = valid.view(*valid.shape, *[1] * (g.ndim - 2))
        fade = clamp_finite(g)[:, 0] if self.by_distance else torch.where(mask, clamp_finite(g), 0.0).sum(1)
        if self.sums:  # of heads (B, H, R), for every feature of a head (B, R, D)
            fade = fade.transpose(1, 2).repeat_interleave(self.dim // fade.shape[1], 2)
        return (None, fade) if self.by_distance else (fade, None)

    def join_states(self, earlier, later, fade):
        m, num, den = merge_faded(*((s.m, s.num, s.den) for s in (earlier, later)), fade)
        return join_rings(earlier, later)[0]._replace(m=m, num=num, den=den, last=later.last)

    def mix_chunk(self, x, state, *, positions, key_mask):
        if self.by_distance:  # without a convolution no other token of the past has a position to compare with
            check_rising_after(self, positions, key_mask, state.last)
        return ring_chunk(self, x, state, positions=positions, key_mask=key_mask, pairs=False)

    def _mix_piece(self, x, state, positions, valid, *, holes=False):
        qkv, past = self._project_tokens(x), (state.m, state.num, state.den)
        if self.conv is not None:
            qkv, state = self.conv(qkv, positions=positions, key_mask=valid, state=state, holes=holes)
        gaps, last = position_gaps(positions, valid, state.last) if self.by_distance else (None, state.last)
        args = *self._split(x, qkv), *self.weights(x, gaps), past
        y, sums = self.chunk(*args, key_mask=valid, **self.options())
        m, num, den = sums
        return y, state._replace(m=m, num=num, den=den, last=last)
