"""Biases that depend on positions and on the query and the keys themselves; for softmax attention only."""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..kernels.precision import exact
from ..types import Options
from .checks import choose_class, is_whole, number
from .pair import PAIR_POSITIONS, PairPositions, build_pair_positions


class ContentPositions(nn.Module):
    """Abstract base of the terms c_h(t, s) of a logit that read the query and the keys, beside their positions.

    Values are computed in float32 or better. Call it to compute it, so that module hooks see the call.

    Args:
        heads: number of heads H.
        head_dim: features e of a head.

    Raises:
        MixerError: if an option is out of its range.
    """

    causal_only = False
    """Whether the term is defined for keys up to the query alone."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim

    def forward(self, q: Tensor, k: Tensor, rows: Tensor, cols: Tensor, seen: Tensor) -> Tensor:
        """Compute the term (B, H, T, S).

        Args:
            q: queries times the scale of the logits, (B, H, T, e); k: keys (B, H, S, e).
            rows, cols: integer positions of the queries (1 or B, T) and of the keys (1 or B, S).
            seen: bool (1 or B, T, S), the pairs that may be attended. Other pairs may get any finite number.
        """
        raise NotImplementedError

    def row_products(self) -> int:
        """Count the FLOPs for each query that are matrix products."""
        return 0

    def pair_products(self) -> int:
        """Count the FLOPs for each pair of tokens that are matrix products."""
        return 0

    def pair_flops(self) -> int:
        """Count the other FLOPs for each pair of tokens."""
        return 2 * self.heads

    def pair_kept(self) -> int:
        """Count the numbers kept for the backward pass for each pair of tokens, beside the weights."""
        return 0

    def refuse(self, why: str) -> NoReturn:
        """Raise ``MixerError`` in the name of this class."""
        raise MixerError(f"{type(self).__name__}: {why}.")


class ShawPositions(ContentPositions):
    """Learned relative positions of the keys: c_h(t, s) = scale q_t . a_r, r = clip(t - s, -n, n), n = max_distance.

    Shaw et al. 2018, arXiv 1803.02155, Eq. 4, with one table of 2 n + 1 vectors for all heads, as there. The vectors
    that the paper also adds to the values are left out, since fused kernels have no place for them.

    Args:
        heads, head_dim: as in ``ContentPositions``.
        max_distance: n, the distance from which on all share a vector; 16 by default.
        init_std: standard deviation of the table's entries at the start, 0.02 by default.
    """

    def __init__(self, heads: int, head_dim: int, *, max_distance: int = 16, init_std: float = 0.02):
        super().__init__(heads, head_dim)
        if not is_whole(max_distance, 1):
            self.refuse(f"max_distance must be an integer >= 1, got {max_distance!r}")
        if not number(init_std) or init_std < 0:
            self.refuse(f"init_std must be a number >= 0, got {init_std!r}")
        self.max_distance, self.init_std = max_distance, init_std
        self.table = nn.Parameter(torch.empty(2 * max_distance + 1, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table again."""
        nn.init.normal_(self.table, std=self.init_std)

    def row_products(self) -> int:
        """Count the FLOPs for each query that are matrix products."""
        return 2 * self.heads * self.head_dim * len(self.table)

    def pair_kept(self) -> int:
        """Count the numbers kept for the backward pass for each pair of tokens, beside the weights."""
        return 2

    @exact
    def forward(self, q: Tensor, k: Tensor, rows: Tensor, cols: Tensor, seen: Tensor) -> Tensor:
        """Compute the term (B, H, T, S)."""
        n = self.max_distance
        every = q @ self.table.to(q.dtype).mT
        which = (rows[:, :, None] - cols[:, None]).clamp(-n, n) + n
        return every.gather(-1, which[:, None].expand(*q.shape[:2], -1, -1))


class ContextualPositions(ContentPositions):
    """Contextual positions (CoPE): c_h(t, s) = scale q_t . e(p_ts), p_ts = sum_{s <= j <= t} sigmoid(scale q_t . k_j).

    p counts the tokens back to s that the query finds relevant. It is cut at ``longest`` - 1, and e(p) is interpolated
    between the learned vectors of the whole numbers on both sides. Golovneva et al. 2024, arXiv 2405.18719, Eq. 3 to 6.
    The vectors start at 0 and serve all heads. Causal mixers only; a masked key counts as irrelevant.

    Args:
        heads, head_dim: as in ``ContentPositions``.
        longest: number of learned vectors, 64 by default.
    """

    causal_only = True

    def __init__(self, heads: int, head_dim: int, *, longest: int = 64):
        super().__init__(heads, head_dim)
        if not is_whole(longest, 2):
            self.refuse(f"longest must be an integer >= 2, got {longest!r}")
        self.table = nn.Parameter(torch.empty(longest, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the vectors to 0."""
        nn.init.zeros_(self.table)

    def row_products(self) -> int:
        """Count the FLOPs for each query that are matrix products."""
        return 2 * self.heads * self.head_dim * len(self.table)

    def pair_products(self) -> int:
        """Count the FLOPs for each pair of tokens that are matrix products."""
        return 2 * self.heads * self.head_dim

    def pair_flops(self) -> int:
        """Count the other FLOPs for each pair of tokens."""
        return 12 * self.heads

    def pair_kept(self) -> int:
        """Count the numbers kept for the backward pass for each pair of tokens, beside the weights."""
        return 10 * self.heads

    @exact
    def forward(self, q: Tensor, k: Tensor, rows: Tensor, cols: Tensor, seen: Tensor) -> Tensor:
        """Compute the term (B, H, T, S)."""
        last = len(self.table) - 1
        gates = (q @ k.mT).sigmoid() * seen[:, None].to(q.dtype)
        p = gates.flip(-1).cumsum(-1).flip(-1).clamp_max(last)
        every, low = q @ self.table.to(q.dtype).mT, p.detach().floor()
        below, above = (every.gather(-1, at.long()) for at in (low, (low + 1).clamp_max(last)))
        return below + (p - low) * (above - below)


class AdaptivePositions(ContentPositions):
    """Context-adaptive positions (CAPE): c(t, s) = b(t, s) + f(scale q_t . k_s, b(t, s)), over all heads at once.

    b is a bias by position for each head, and f an MLP from the 2 H logits and biases of a pair to H numbers, with one
    hidden layer and a leaky ReLU. Zheng et al. 2024, arXiv 2405.14722. The last layer starts at 0, so that the mixer
    starts with b alone.

    Args:
        heads, head_dim: as in ``ContentPositions``.
        of: the bias b, {"name": "alibi", "t5", "kerple", "sandwich" or "fire"} with its options. Default KERPLE.
        hidden: width of the hidden layer, 32 by default.
    """

    def __init__(self, heads: int, head_dim: int, *, of: Options | None = None, hidden: int = 32):
        super().__init__(heads, head_dim)
        if not is_whole(hidden, 1):
            self.refuse(f"hidden must be an integer >= 1, got {hidden!r}")
        spec = {"name": "kerple"} if of is None else of
        self.of = build_pair_positions(spec, heads, owner=type(self).__name__, option="of")
        self.up, self.up_bias = nn.Parameter(torch.empty(hidden, 2 * heads)), nn.Parameter(torch.empty(hidden))
        self.down, self.down_bias = nn.Parameter(torch.empty(heads, hidden)), nn.Parameter(torch.empty(heads))
        self._draw()

    def reset_parameters(self) -> None:
        """Draw the bias and the hidden layer again, and set the last layer to 0."""
        self.of.reset_parameters()
        self._draw()

    def _draw(self) -> None:
        for drawn in (self.up, self.up_bias):
            nn.init.uniform_(drawn, -(self.up.shape[1] ** -0.5), self.up.shape[1] ** -0.5)
        for zero in (self.down, self.down_bias):
            nn.init.zeros_(zero)

    def pair_products(self) -> int:
        """Count the FLOPs for each pair of tokens that are matrix products."""
        return 2 * self.heads * (self.head_dim + 3 * len(self.up)) + self.of.pair_products()

    def pair_flops(self) -> int:
        """Count the other FLOPs for each pair of tokens."""
        return 2 * len(self.up) + 4 * self.heads + self.of.pair_flops()

    def pair_kept(self) -> int:
        """Count the numbers kept for the backward pass for each pair of tokens, beside the weights."""
        return 2 * len(self.up) + 2 * self.heads + self.of.pair_kept()

    @exact
    def forward(self, q: Tensor, k: Tensor, rows: Tensor, cols: Tensor, seen: Tensor) -> Tensor:
        """Compute the term (B, H, T, S)."""
        logits = q @ k.mT
        b = self.of(rows, cols, q.dtype).to(q.dtype).expand_as(logits)
        up, up_bias, down, down_bias = (a.to(q.dtype) for a in (self.up, self.up_bias, self.down, self.down_bias))
        pairs = torch.cat([logits, b], 1).permute(0, 2, 3, 1)
        hidden = F.leaky_relu(F.linear(pairs, up, up_bias))
        return b + F.linear(hidden, down, down_bias).permute(0, 3, 1, 2)


CONTENT_POSITIONS: dict[str, type[ContentPositions]] = {
    "shaw": ShawPositions,
    "cope": ContextualPositions,
    "cape": AdaptivePositions,
}
"""Biases that read queries and keys, by name."""


def build_logit_bias(
    spec: object, heads: int, head_dim: int, *, causal: bool, owner: str
) -> PairPositions | ContentPositions:
    """Build a bias of attention's logits, of positions alone or of queries and keys too.

    Args:
        spec: such as {"name": "fire", "hidden": 16}, with a name in ``PAIR_POSITIONS`` or ``CONTENT_POSITIONS``.
        owner: who asks, in errors.

    Raises:
        MixerError: for an unknown name or option, or a bias that a mixer which is not causal cannot have.
    """
    kinds: dict[str, type[PairPositions] | type[ContentPositions]] = {**PAIR_POSITIONS, **CONTENT_POSITIONS}
    kind, options = choose_class(spec, kinds, ("heads", "head_dim"), who=owner, option="bias")
    if issubclass(kind, ContentPositions) and kind.causal_only and not causal:
        raise MixerError(f"{owner}: bias={spec!r} counts the tokens before the query, so it needs causal=True.")
    try:
        return kind(heads, head_dim, **options) if issubclass(kind, ContentPositions) else kind(heads, **options)
    except MixerError as why:
        raise MixerError(f"{owner}: bias={spec!r}: {str(why).rstrip('.')}.") from None
