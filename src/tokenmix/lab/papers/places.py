"""Measures of positions: where digits, and tokens in training, are taken to stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .identities import HEADS, D, T, compared, drawn


def abacus_offset() -> int:
    """Return the largest offset that Abacus embeddings draw at their defaults."""
    from ...positions import AbacusPositions

    return AbacusPositions(2).max_offset - 1


def abacus_places() -> str:
    """Return the rows of Abacus embeddings for the characters of a sum, in evaluation."""
    from ...positions import AbacusPositions

    text = torch.tensor([list(b"12+345=753")])
    places = AbacusPositions(2, max_len=128).double().eval()
    with torch.no_grad():
        places.weight[:, 0] = torch.arange(128)
    found, _ = places(text, None, torch.zeros(1, dtype=torch.long))
    return " ".join(str(int(row)) for row in found[0, :, 0].tolist())


def abacus_parameters(layers: int) -> float:
    """Compute the parameters (in millions) of the paper's model with a given number of layers.

    Of each layer, with D = 1024: attention 4 D^2, a gated MLP of inner width 1024 3 D^2, two LayerNorms 4 D; besides
    those a head of 3 D^2, 1,024 rows of Abacus embeddings, embedding and decoder of 118 symbols, two LayerNorms. No
    biases.
    """
    width = 1024
    layer = 7 * width**2 + 4 * width
    return (layers * layer + 3 * width**2 + 1024 * width + 2 * 118 * width + 4 * width) / 1e6


def fire_width() -> int:
    """Return the hidden width of FIRE's MLP at its defaults."""
    from ...positions import Fire

    return Fire(1).hidden


def sampled(name: str) -> Callable[[], str]:
    """Return a measure of the positions that a sampler draws for four tokens of at most eight."""

    def measure() -> str:
        from ...positions import SAMPLERS

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            rows = SAMPLERS[name](torch.arange(4).expand(2000, -1), 8)
        gaps = (rows.diff(dim=1) > 1).sum(1)
        rises = bool((rows.diff(dim=1) > 0).all()) and int(rows.min()) >= 0 and int(rows.max()) < 8
        kinds = {"offset": int(gaps.max()) == 0, "pose": int(gaps.max()) == 1, "randomised": int(gaps.max()) > 1}
        return f"{len(rows.unique(dim=0))} rows" if rises and kinds[name] else "not as described"

    return measure


def cape_range() -> str:
    """Return the bounds of CAPE's jitter of position 10, if all positions drawn lie within and come near them."""
    from ...positions.samplers import jittered

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        at = jittered(torch.full((20_000, 1), 10), global_shift=4.0, local_shift=0.5, scale=2.0)
    low, high = float(at.min()), float(at.max())
    return "2.75 to 29" if 2.75 <= low < 3 and 28 < high <= 29 else f"{low:.2f} to {high:.2f}"


def logit_bias(name: str, equation: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[], str]:
    """Return a measure that compares a bias that reads queries and keys with its equation, in a causal row."""

    def measure() -> str:
        from ...positions import build_logit_bias

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            bias = build_logit_bias({"name": name}, HEADS, D, causal=True, owner="papers").double()
            for parameter in bias.parameters():
                torch.nn.init.normal_(parameter)
        q, k = drawn(1, HEADS, T, D), drawn(1, HEADS, T, D, seed=1)
        at, seen = torch.arange(T)[None], torch.ones(1, T, T, dtype=torch.bool).tril()
        return compared(bias(q, k, at, at, seen).tril(), equation(bias, q, k).tril())

    return measure


def shaw(bias: Any, q: Tensor, k: Tensor) -> Tensor:
    """Write out q_i p_r, r = clip(i - j), with the module's own vectors."""
    far = torch.arange(T)[:, None] - torch.arange(T)
    return torch.einsum("bhid,ijd->bhij", q, bias.table[far.clamp(-16, 16) + 16])


def cope(bias: Any, q: Tensor, k: Tensor) -> Tensor:
    """Write out q_i e(p_ij), p the sum of the gates of j .. i, with e interpolated by hat functions."""
    gates = (q @ k.mT).sigmoid()
    p = torch.stack([gates.tril()[..., j:].sum(-1) for j in range(T)], -1)
    hats = (1 - (p[..., None] - torch.arange(len(bias.table))).abs()).clamp_min(0)
    return torch.einsum("bhid,nd,bhijn->bhij", q, bias.table, hats)


def cape(bias: Any, q: Tensor, k: Tensor) -> Tensor:
    """Write out b + f(qk, b) with the module's own KERPLE bias and MLP."""
    r1, r2 = (r.view(-1, 1, 1) for r in bias.of.rates(torch.float64))
    far = (torch.arange(T)[:, None] - torch.arange(T)).abs().double()
    b = (-r1 * (1 + r2 * far).log()).expand(1, HEADS, T, T)
    both = torch.cat([q @ k.mT, b], 1).movedim(1, -1)
    hidden = both @ bias.up.T + bias.up_bias
    hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
    return b + (hidden @ bias.down.T + bias.down_bias).movedim(-1, 1)


def xpos() -> str:
    """Compare products of queries and keys 40 positions apart with RoPE's, pair by pair times zeta^(40 / 512)."""
    from ...positions import RotaryPositions, XPositions

    ours, rotary, q, k = XPositions(D), RotaryPositions(D), drawn(1, 1, 1, D), drawn(1, 1, 1, D, seed=1)
    (t, s), half = (torch.tensor([[n]]) for n in (70, 30)), D // 2

    def turned(at: Tensor, x: Tensor) -> Tensor:
        return rotary(at, x[:, 0])[0][:, None]

    middle = torch.tensor([50])
    got = ours.faded(turned(t, q), t, middle, key=False) * ours.faded(turned(s, k), s, middle, key=True)
    zeta = torch.tensor([((2 * m / D + 0.4) / 1.4) ** (40 / 512) for m in range(half)], dtype=torch.float64)
    return compared(got.sum(), (turned(t, q) * turned(s, k) * torch.cat([zeta, zeta])).sum())
