"""Input generators: seeded noise, masks, and keys on which unstable exponentials overflow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LATE = 0.9  # the late spike's place along time


def draw_tensor(draw: Callable[..., Tensor], *shape: object, generator: torch.Generator, **options: object) -> Tensor:
    """Draw numbers on the CPU, so that a seed means the same everywhere, and put them on the default device."""
    return draw(*shape, generator=generator, device="cpu", **options).to(torch.get_default_device())


def noise(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw standard normal numbers that depend on the seed and the shape only."""
    return draw_tensor(torch.randn, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def uniform(*shape: int, seed: int, low: float, high: float) -> Tensor:
    """Draw uniform numbers in [low, high], float64."""
    numbers = draw_tensor(torch.rand, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers * (high - low) + low


def _along_time(shape: tuple[int, ...], low: float, high: float) -> Tensor:
    return torch.linspace(low, high, shape[1], dtype=torch.float64)[None, :, None].expand(shape).clone()


def _spike_key(keys: Tensor, value: float) -> Tensor:
    keys[:, int(LATE * keys.shape[1])] = value
    return keys


KEYS: dict[str, Callable[..., Tensor]] = {
    "normal": lambda shape, seed, size: noise(*shape, seed=seed),
    "uniform": lambda shape, seed, size: uniform(*shape, seed=seed, low=-size, high=size),
    "late spike": lambda shape, seed, size: _spike_key(noise(*shape, seed=seed), size),
    "low with a late spike": lambda shape, seed, size: _spike_key(torch.full(shape, -size, dtype=torch.float64), size),
    "early spike": lambda shape, seed, size: noise(*shape, seed=seed).index_fill(1, torch.tensor([0]), size),
    "ramp up": lambda shape, seed, size: _along_time(shape, -size, size),
    "ramp down": lambda shape, seed, size: _along_time(shape, size, -size),
    "constant": lambda shape, seed, size: torch.full(shape, size, dtype=torch.float64),
    "constant low": lambda shape, seed, size: torch.full(shape, -size, dtype=torch.float64),
    "alternating": lambda shape, seed, size: (
        _along_time(shape, 1, 1) * size * (1 - 2 * (torch.arange(shape[1])[None, :, None] % 2))
    ),
}
"""Name -> f(shape (B, S, features), seed, size): keys up to about +-size.

At size 100 exp() overflows in float32, at 1e4 in every dtype.
"""


def adversarial_keys(shape: tuple[int, ...], *, size: float, seed: int = 0) -> dict[str, Tensor]:
    """Return every pattern of ``KEYS`` at one size, by name."""
    return {name: make(shape, seed, size) for name, make in KEYS.items()}


def big_bias(args: tuple, *, size: float, seed: int = 0) -> tuple:
    """Draw log-weights in [-size, size] for the bias arguments of a functional form.

    A tuple is taken as factors (u, v) of rank r.
    """
    out: list[Tensor | tuple[Tensor, ...]] = []
    for i, w in enumerate(args):
        if isinstance(w, tuple):
            part = (size / max(1, w[0].shape[-1])) ** 0.5
            out.append(tuple(uniform(*f.shape, seed=seed + 10 * i + j, low=-part, high=part) for j, f in enumerate(w)))
        else:
            out.append(uniform(*w.shape, seed=seed + i, low=-size, high=size))
    return tuple(out)


def key_masks(length: int) -> dict[str, Tensor]:
    """Return masks (2, length) by name, True = may be attended, with different rows.

    They are padding at the left ("left"), at the right ("right"), in between ("holes"), and all of these ("mixed").
    """
    index = torch.arange(length)
    a, b = max(1, length // 4), max(1, length // 2)
    one = {
        "left": (index >= a, index >= b),
        "right": (index < length - a, index < length - b),
        "holes": (index % 3 != 1, index % 4 != 2),
    }
    one["mixed"] = ((index >= a) & (index % 4 != 2), (index < length - a) & (index % 3 != 1))
    return {name: torch.stack(rows) for name, rows in one.items()}


def pair_mask(rows: int, queries: int, keys: int, *, seed: int) -> Tensor:
    """Draw a bool mask (rows, queries, keys), about two thirds True, where query 0 of row 0 has nothing to attend."""
    ok = draw_tensor(torch.rand, rows, queries, keys, generator=torch.Generator().manual_seed(seed)) < 0.67
    ok[0, 0] = False
    return ok


def increasing_positions(rows: int, length: int, limit: int, *, seed: int) -> Tensor:
    """Draw (rows, length) increasing positions below ``limit``, with gaps where possible, different in each row."""
    generator = torch.Generator().manual_seed(seed)
    orders = [draw_tensor(torch.randperm, limit, generator=generator) for _ in range(rows)]
    return torch.stack([order[:length].sort().values for order in orders])
