"""Biases for pairs of positions: a term b_h(t, s) that is added to the logit, or log-weight, of a query and a key."""

from __future__ import annotations

from math import ceil, isfinite
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..kernels.backend import is_exporting, is_intercepted
from ..kernels.precision import exact
from ..system.properties import named_errors
from .checks import check_exact, check_integers, choose_class, is_whole, number


@named_errors
class PairPositions(nn.Module):
    """Abstract base of the biases b_h(t, s) for a query at position t and a key at position s, in head h.

    A bias that depends on the distance t - s alone implements ``of_distance``; any other implements ``between``. There
    is no longest sequence. Values are computed in float32 or better. Call it to compute it, so that module hooks see
    the call.

    Args:
        heads: number of heads H.

    Raises:
        MixerError: if an option is out of its range.
    """

    def __init__(self, heads: int):
        super().__init__()
        if not is_whole(heads, 1):
            self.refuse(f"heads must be an integer >= 1, got {heads!r}")
        self.heads = heads

    def reset_parameters(self) -> None:
        """Draw the parameters again; by default there are none."""

    def of_distance(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute b_h for integer distances t - s of any shape: (H, *shape) in ``dtype`` or wider."""
        raise NotImplementedError

    def slopes(self) -> Tensor | None:
        """Return m (H,) in float64 if b_h(t, s) = -m_h |t - s|, else None."""
        return None

    @property
    def by_distance(self) -> bool:
        """Return whether the bias depends on t - s alone."""
        return type(self).of_distance is not PairPositions.of_distance

    def pair_flops(self) -> int:
        """Count the FLOPs for each pair of tokens, without those that ``pair_products`` counts."""
        return 2 * self.heads

    def pair_products(self) -> int:
        """Count the FLOPs for each pair of tokens that are matrix products."""
        return 0

    def pair_kept(self) -> int:
        """Count the numbers kept for the backward pass for each pair of tokens."""
        return 0

    def forward(
        self,
        rows: Tensor | tuple[int, int],
        cols: Tensor | int | None,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> Tensor:
        """Compute the bias (1 or B, H, T, S); or, of distances of any shape given as rows without cols, (H, *shape).

        Args:
            rows: integer positions of the queries (B, T), or the first and the last plus 1 of consecutive ones.
            cols: integer positions of the keys (B, S), or their number, if they stand at 0 .. S - 1.
            dtype: dtype of the result, unless that is narrower than float32.
            device: of the result, where positions are not tensors.
        """
        # torch.jit.trace gives numbers as tensors
        if isinstance(rows, tuple) and cols is not None and (not isinstance(cols, Tensor) or cols.ndim == 0):
            count: Any = cols
            return self.leading_bias(*rows, count, dtype, device)
        given = [a for a in (rows, cols) if isinstance(a, Tensor)]
        check_integers(type(self).__name__, *given)
        check_exact(type(self).__name__, *given)
        if isinstance(rows, Tensor) and cols is None and self.by_distance:
            return self.of_distance(rows, dtype)
        if not isinstance(rows, Tensor) or not isinstance(cols, Tensor):
            alone = ", or distances alone" if self.by_distance else ""
            self.refuse(f"expects positions of queries and of keys both as tensors, or both as numbers{alone}")
        return self.between(rows, cols, dtype)

    def between(self, rows: Tensor, cols: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the bias (B, H, T, S) for integer positions of queries (B, T) and of keys (B, S)."""
        return self.of_distance(rows[:, :, None] - cols[:, None], dtype).transpose(0, 1)

    def leading_bias(
        self, start: int, stop: int, keys: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        """Compute the same (1, H, T, S) for queries at start .. stop - 1 and keys at 0 .. keys - 1.

        A bias that depends on the distance is computed once for each distance.
        """
        if not self.by_distance or keys == 0 or start == stop:
            at = torch.arange(start, stop, device=device)[None]
            return self.between(at, torch.arange(keys, device=device)[None], dtype)
        every = self.of_distance(torch.arange(start - keys + 1, stop, device=device), dtype)  # T + S - 1 distances
        return _spread(every, stop - start, keys)

    def taps(self, first: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Compute the bias (H, count) of the distances first, first - 1, ..., as windows take it."""
        return self(first - torch.arange(count, device=device), None, dtype)

    def refuse(self, why: str) -> NoReturn:
        """Raise ``MixerError`` in the name of this bias."""
        raise MixerError(f"{type(self).__name__}: {why}.")


class ALiBi(PairPositions):
    """Attention with linear biases: b_h(t, s) = -m_h |t - s|. Press et al. 2021, arXiv 2108.12409.

    m_h = 2^(-8 h / H), h = 1 .. H, for H a power of two. Otherwise the slopes of the next lower power of two P, then
    the first, third, ... of those of 2 P, as in the authors' code. Both sides of a query that sees both count alike.

    Args:
        heads: as in ``PairPositions``.
        slope: the largest m_h; the others keep their ratio to it. None: the paper's. That of a single head is 2^-8,
            with which the bias is nearly flat over some hundreds of tokens.
        learned: learn log m_h, starting from these slopes. Default False.
    """

    def __init__(self, heads: int, *, slope: float | None = None, learned: bool = False):
        super().__init__(heads)
        if slope is not None and not (number(slope) and slope > 0):
            self.refuse(f"slope must be a positive number, or None for the paper's, got {slope!r}")
        if not isinstance(learned, bool):
            self.refuse(f"learned must be True or False, got {learned!r}")
        paper = alibi_slopes(heads)
        self.start = [m * (1.0 if slope is None else slope / max(paper)) for m in paper]
        self.log_slope = nn.Parameter(torch.empty(heads)) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the learned slopes to those they start from."""
        if self.log_slope is not None:
            with torch.no_grad():
                self.log_slope.copy_(torch.tensor(self.start, dtype=torch.float64, device="cpu").log())

    def slopes(self) -> Tensor:
        """Return m (H,) in float64."""
        if self.log_slope is None:
            return torch.tensor(self.start, dtype=torch.float64, device="cpu")
        return self.log_slope.double().exp()

    def of_distance(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute -m_h |distance|."""
        kind = _promote_float32(dtype)
        slopes = self.slopes().to(distance.device, kind)
        return -slopes.view(-1, *[1] * distance.ndim) * distance.abs().to(kind)


class T5Bias(PairPositions):
    """T5's learned bias per bucket of distances: b_h(t, s) = table[bucket(t - s), h]. Raffel et al. 2019, 1910.10683.

    Half of the buckets hold one distance each; the others grow geometrically up to ``max_distance``, and the last one
    holds all beyond. T5's encoders have ``two_sided=True``. T5 shares one table among all layers; here each layer has
    its own.

    Args:
        heads: as in ``PairPositions``.
        buckets: number of buckets, 32 by default; even, and at least 4 if ``two_sided``.
        max_distance: the distance from which on all share a bucket, 128 by default.
        two_sided: keys after the query have half of the buckets, instead of sharing those before it by distance.
            Default False.
        init_std: standard deviation of the table's entries at the start, 0.02 by default.
    """

    def __init__(
        self, heads: int, *, buckets: int = 32, max_distance: int = 128, two_sided: bool = False, init_std: float = 0.02
    ):
        super().__init__(heads)
        if not isinstance(two_sided, bool):
            self.refuse(f"two_sided must be True or False, got {two_sided!r}")
        least = 4 if two_sided else 2
        if not is_whole(buckets, least) or buckets % 2:
            self.refuse(f"buckets must be even and at least {least} with two_sided={two_sided}, got {buckets!r}")
        side = buckets // 2 if two_sided else buckets
        if not is_whole(max_distance, side // 2 + 1):
            self.refuse(
                f"max_distance must exceed the {side // 2} distances with a bucket of their own, got {max_distance!r}"
            )
        if not number(init_std) or init_std < 0:
            self.refuse(f"init_std must be a number >= 0, got {init_std!r}")
        self.buckets, self.max_distance, self.two_sided, self.init_std = buckets, max_distance, two_sided, init_std
        self._of_distance = t5_buckets(side, max_distance)
        self.table = nn.Parameter(torch.empty(buckets, heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table again."""
        nn.init.normal_(self.table, std=self.init_std)

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the bucket of each distance t - s."""
        known = torch.tensor(self._of_distance, device=distance.device)
        found = known[distance.abs().clamp_max(self.max_distance)]
        return torch.where(distance < 0, found + self.buckets // 2, found) if self.two_sided else found

    def of_distance(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        """Look the buckets of distances up in the table."""
        return F.embedding(self.bucket(distance), self.table.to(_promote_float32(dtype))).movedim(-1, 0)


class Kerple(PairPositions):
    """Kernelised relative positions. Chi et al. 2022, arXiv 2205.09921.

    "log": b_h(t, s) = -r1_h log(1 + r2_h |t - s|). "power": b_h(t, s) = -r1_h |t - s|^r2_h with 0 < r2_h < 2. r1 and r2
    are learned; they start from a uniform distribution over (0, 2).

    Args:
        heads: as in ``PairPositions``.
        kind: "log" (default) or "power".
    """

    def __init__(self, heads: int, *, kind: str = "log"):
        super().__init__(heads)
        if kind not in ("log", "power"):
            self.refuse(f"kind must be 'log' or 'power', got {kind!r}")
        self.kind = kind
        self.raw = nn.Parameter(torch.empty(2, heads))  # r = softplus(raw); r2 of "power" is 2 sigmoid(raw)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw r1 and r2 again."""
        with torch.no_grad():
            drawn = torch.rand(2, self.heads, dtype=torch.float32, device="cpu").mul(1.98).add(0.01)
            self.raw.copy_(drawn.expm1().log())
            if self.kind == "power":
                self.raw[1] = (drawn[1] / 2).logit()

    def rates(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return r1 and r2, (H,) each."""
        raw = self.raw.to(_promote_float32(dtype))
        return F.softplus(raw[0]), 2 * raw[1].sigmoid() if self.kind == "power" else F.softplus(raw[1])

    def of_distance(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the bias of distances."""
        r1, r2 = (r.view(-1, *[1] * distance.ndim) for r in self.rates(dtype))
        n = distance.abs().to(r1.dtype)
        if self.kind == "log":
            return -r1 * torch.log1p(r2 * n)
        return -r1 * torch.where(n > 0, n.clamp_min(1).pow(r2), 0.0)


class Sandwich(PairPositions):
    """The products of sinusoidal positions: b_h(t, s) = c_h sum_i (cos((t - s) w_i) - 1), w_i = 10000^(-2 i / dim).

    i = 1 .. dim / 2, c_h = 8 h / (H dim), h = 1 .. H; nothing is learned. Chi et al. 2023, arXiv 2212.10356. The - 1,
    which makes the bias 0 at distance 0, cancels in a softmax.

    Args:
        heads: as in ``PairPositions``.
        dim: number of sinusoids, even; 128 by default.
    """

    def __init__(self, heads: int, *, dim: int = 128):
        super().__init__(heads)
        if not is_whole(dim, 2) or dim % 2:
            self.refuse(f"dim must be an even number, got {dim!r}")
        self.dim = dim

    def of_distance(self, distance: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the bias of distances, with angles in float64."""
        rates = 10000.0 ** (
            torch.arange(1, self.dim // 2 + 1, device=distance.device, dtype=torch.float64) * -2 / self.dim
        )
        total = ((distance.double()[..., None] * rates).cos() - 1).sum(-1)
        scale = (
            torch.arange(1, self.heads + 1, device=distance.device, dtype=torch.float64) * 8 / (self.heads * self.dim)
        )
        return (scale.view(-1, *[1] * distance.ndim) * total).to(_promote_float32(dtype))


class Fire(PairPositions):
    """Functional interpolation: b_h(t, s) = f_h(psi(|t - s|) / psi(max(t, L))), psi(x) = log(|c| x + 1).

    f is an MLP of one hidden layer with ReLU; c and L are learned. Li et al. 2023, arXiv 2310.04418. The distance is
    measured against the query's own position, so a bias of one query never changes as tokens are added. As in the
    authors' code, 1e-6 is added to the denominator.

    Args:
        heads: as in ``PairPositions``.
        hidden: width of the hidden layer, 32 by default.
        c: c at the start, 0.1 by default.
        threshold: L at the start, 512 by default; it is learned as a factor of this number.
    """

    def __init__(self, heads: int, *, hidden: int = 32, c: float = 0.1, threshold: float = 512.0):
        super().__init__(heads)
        if not is_whole(hidden, 1):
            self.refuse(f"hidden must be an integer >= 1, got {hidden!r}")
        for name, value in (("c", c), ("threshold", threshold)):
            if not number(value) or value <= 0:
                self.refuse(f"{name} must be a positive number, got {value!r}")
        self.hidden, self.start_c, self.threshold = hidden, c, threshold
        self.c, self.length = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))
        self.up, self.up_bias = nn.Parameter(torch.empty(hidden)), nn.Parameter(torch.empty(hidden))
        self.down, self.down_bias = nn.Parameter(torch.empty(heads, hidden)), nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the MLP again, as torch draws linear layers; set c and L to their starts."""
        nn.init.constant_(self.c, self.start_c)
        nn.init.ones_(self.length)
        nn.init.uniform_(self.up, -1, 1)
        nn.init.uniform_(self.up_bias, -1, 1)
        nn.init.uniform_(self.down, -(self.hidden**-0.5), self.hidden**-0.5)
        nn.init.uniform_(self.down_bias, -(self.hidden**-0.5), self.hidden**-0.5)

    def pair_flops(self) -> int:
        """Count the FLOPs for each pair of tokens, without those that ``pair_products`` counts."""
        return 3 * self.hidden + 2 * self.heads

    def pair_products(self) -> int:
        """Count the FLOPs for each pair of tokens that are matrix products."""
        return 2 * self.hidden * self.heads

    def pair_kept(self) -> int:
        """Count the numbers kept for the backward pass for each pair of tokens."""
        return self.hidden + 4

    @exact
    def between(self, rows: Tensor, cols: Tensor, dtype: torch.dtype) -> Tensor:
        """Compute the bias for pairs of positions."""
        kind = _promote_float32(dtype)
        reach = torch.maximum(rows.to(kind), self._limit(kind))
        return self._bias((rows[:, :, None] - cols[:, None]).to(kind), reach[:, :, None]).permute(0, 3, 1, 2)

    def leading_bias(
        self, start: int, stop: int, keys: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> Tensor:
        """Compute the bias for consecutive positions; below L it depends on the distance alone."""
        near = self._rows_below_limit(start, stop) if keys else 0
        if not near:
            return super().leading_bias(start, stop, keys, dtype, device)
        kind = _promote_float32(dtype)
        every = self._bias(torch.arange(start - keys + 1, start + near, device=device).to(kind), self._limit(kind))
        parts = [_spread(every.T, near, keys)]
        if start + near < stop:
            parts.append(super().leading_bias(start + near, stop, keys, dtype, device))
        return torch.cat(parts, 2)

    def _rows_below_limit(self, start: int, stop: int) -> int:
        """Count the queries start .. stop - 1 at positions below L, where L can be read without waiting for it."""
        if is_intercepted() or is_exporting() or not self.length.is_cpu:
            return 0
        limit = abs(float(self.length.detach()) * self.threshold)
        return max(0, ceil(min(limit, stop)) - start) if isfinite(limit) else 0

    def _limit(self, kind: torch.dtype) -> Tensor:
        """Return L, a number."""
        return (self.length.to(kind) * self.threshold).abs()

    @exact
    def _bias(self, distance: Tensor, reach: Tensor) -> Tensor:
        """Compute f(psi(|distance|) / psi(reach)) with the heads as the last axis."""
        c, up, up_bias, down, down_bias = (
            a.to(distance.dtype) for a in (self.c, self.up, self.up_bias, self.down, self.down_bias)
        )
        near = torch.log(c.abs() * distance.abs() + 1)
        far = torch.log(c.abs() * reach + 1) + 1e-6
        hidden = torch.addcmul(up_bias, (near / far)[..., None], up)  # the largest tensor: written once
        return F.linear(F.relu_(hidden), down, down_bias)


PAIR_POSITIONS: dict[str, type[PairPositions]] = {
    "alibi": ALiBi,
    "t5": T5Bias,
    "kerple": Kerple,
    "sandwich": Sandwich,
    "fire": Fire,
}
"""Biases for pairs of positions, by name."""


def build_pair_positions(spec: object, heads: int, *, owner: str, option: str = "bias") -> PairPositions:
    """Build a bias from a spec such as {"name": "fire", "hidden": 16}.

    Args:
        owner: who asks, in errors.
        option: the name of the option that holds the spec, in errors.

    Raises:
        MixerError: for an unknown name or option.
    """
    kind, options = choose_class(spec, PAIR_POSITIONS, ("heads",), who=owner, option=option)
    try:
        return kind(heads, **options)
    except MixerError as why:
        raise MixerError(f"{owner}: {option}={spec!r}: {str(why).rstrip('.')}.") from None


def alibi_slopes(heads: int) -> list[float]:
    """Return ALiBi's m_h."""
    low = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * h / low) for h in range(1, low + 1)]
    return slopes + [2.0 ** (-4 * h / low) for h in range(1, 2 * (heads - low), 2)]


def t5_buckets(buckets: int, max_distance: int) -> list[int]:
    """Return the bucket of each distance 0 .. max_distance to one side; those beyond share the last one's.

    Distance n of the upper half is in bucket half + floor(half log(n / half) / log(max_distance / half)). Where the
    logarithms' ratio is a whole number, rounding would decide, so powers of integers are compared instead.
    """
    half = buckets // 2
    rest, found = buckets - half, []
    for n in range(max_distance + 1):
        step = 0
        while n >= half and step < rest and n**rest * half ** (step + 1) >= max_distance ** (step + 1) * half**rest:
            step += 1
        found.append(n if n < half else min(half + step, buckets - 1))
    return found


def _spread(every: Tensor, rows: int, keys: int) -> Tensor:
    """Return the bias (1, H, rows, keys) of consecutive positions from that of all their distances, least first."""
    t, s = torch.arange(rows, device=every.device), torch.arange(keys, device=every.device)
    which = t[:, None] - s + keys - 1
    return every.index_select(-1, which.flatten()).unflatten(-1, (rows, keys))[None]


def _promote_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
