"""Values of position encodings: positions of digits, sampled positions, and biases compared with their equations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ... import reference
from .claim import mark_stated
from .identities import HEADS, D, T, compare_values, draw_tensor, qkv


@mark_stated
def abacus_offset() -> int:
    """Return the largest offset that Abacus embeddings draw at their defaults."""
    from ...positions import AbacusPositions

    return AbacusPositions(2).max_offset - 1


def abacus_places(text: str) -> str:
    """Return the rows of Abacus embeddings for the characters of a text, in evaluation."""
    from ...positions import AbacusPositions

    places = AbacusPositions(2, max_len=128).double().eval()
    with torch.no_grad():
        places.weight[:, 0] = torch.arange(128)
    found, _ = places(torch.tensor([list(text.encode())]), None, torch.zeros(1, dtype=torch.long))
    return " ".join(str(int(row)) for row in found[0, :, 0].tolist())


@mark_stated
def abacus_parameters(layers: int, percent_of: int = 0) -> float:
    """Compute the parameters (in millions) of the paper's model with a given number of layers.

    Of each layer, with D = 1024: attention 4 D^2, a gated MLP of inner width 1024 3 D^2, two LayerNorms 4 D; besides
    those a head of 3 D^2, 1,024 rows of Abacus embeddings, embedding and decoder of 118 symbols, two LayerNorms. No
    biases.

    Args:
        percent_of: layers of a model of whose parameters the percentage is returned.
    """
    if percent_of:
        return 100 * abacus_parameters(layers) / abacus_parameters(percent_of)
    width = 1024
    layer = 7 * width**2 + 4 * width
    return (layers * layer + 3 * width**2 + 1024 * width + 2 * 118 * width + 4 * width) / 1e6


@mark_stated
def fire_width() -> int:
    """Return the hidden width of FIRE's MLP at its defaults."""
    from ...positions import Fire

    return Fire(1).hidden


def count_samples(sampler: str) -> str:
    """Count the rows of positions that a sampler draws for four tokens of at most eight, if they are as described."""
    from ...positions import SAMPLERS

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rows = SAMPLERS[sampler](torch.arange(4).expand(2000, -1), 8)
    gaps = (rows.diff(dim=1) > 1).sum(1)
    rises = bool((rows.diff(dim=1) > 0).all()) and int(rows.min()) >= 0 and int(rows.max()) < 8
    kinds = {"offset": int(gaps.max()) == 0, "pose": int(gaps.max()) == 1, "randomised": int(gaps.max()) > 1}
    return f"{len(rows.unique(dim=0))} rows" if rises and kinds[sampler] else "not as described"


def cape_range() -> str:
    """Return the bounds of CAPE's jitter of position 10, if all positions drawn lie within and come near them."""
    from ...positions.samplers import jitter_positions

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        at = jitter_positions(torch.full((20_000, 1), 10), global_shift=4.0, local_shift=0.5, scale=2.0)
    low, high = float(at.min()), float(at.max())
    return "2.75 to 29" if 2.75 <= low < 3 and 28 < high <= 29 else f"{low:.2f} to {high:.2f}"


def sinusoids() -> str:
    """Compare the fixed positions of EAMLP with sines and cosines written out."""
    from ...models.eamlp import sinusoids

    table = [[(math.sin, math.cos)[i % 2](t / 10_000 ** ((i - i % 2) / 6)) for i in range(6)] for t in range(7)]
    off = float((sinusoids(7, 6).double() - torch.tensor(table, dtype=torch.float64)).abs().max())
    return "equal" if off < 1e-6 else f"off by {off:.1e}"


def smooth() -> str:
    """Compare smooth positions with their waves written out."""
    from ...positions import SmoothPositions

    built = SmoothPositions(5, waves=2, shortest=4, longest=16).double()
    a, b = built.weight.detach().split(2)
    angles = [[2 * math.pi * t / length for length in (4, 16)] for t in range(9)]
    wanted = [sum(a[m] * math.cos(x) + b[m] * math.sin(x) for m, x in enumerate(row)) for row in angles]
    return compare_values(built(torch.arange(9)[None]).detach()[0], torch.stack(wanted))


def rotary_is_relative() -> str:
    """Compare products of rotated queries and keys at positions 3 and 5 with those at 103 and 105."""
    from ...positions import RotaryPositions

    rotary, (q, k, _) = RotaryPositions(D), (x[:1, :1] for x in qkv())

    def product(i: int, j: int) -> Tensor:
        return (rotary(torch.tensor([[i]]), q)[0] * rotary(torch.tensor([[j]]), k)[0]).sum()

    return compare_values(product(103, 105), product(3, 5))


def xpos() -> str:
    """Compare products of queries and keys 40 positions apart with RoPE's, pair by pair times zeta^(40 / 512)."""
    from ...positions import RotaryPositions, XPositions

    ours, rotary, q, k = XPositions(D), RotaryPositions(D), draw_tensor(1, 1, 1, D), draw_tensor(1, 1, 1, D, seed=1)
    (t, s), half = (torch.tensor([[n]]) for n in (70, 30)), D // 2

    def turn_query(at: Tensor, x: Tensor) -> Tensor:
        return rotary(at, x[:, 0])[0][:, None]

    middle = torch.tensor([50])
    got = ours.decay_features(turn_query(t, q), t, middle, key=False) * ours.decay_features(
        turn_query(s, k), s, middle, key=True
    )
    zeta = torch.tensor([((2 * m / D + 0.4) / 1.4) ** (40 / 512) for m in range(half)], dtype=torch.float64)
    return compare_values(got.sum(), (turn_query(t, q) * turn_query(s, k) * torch.cat([zeta, zeta])).sum())


def t5_bucket_count() -> int:
    """Count the buckets that T5's bias gives to distances 0 .. 128 at its defaults."""
    from ...positions import T5Bias

    return len(T5Bias(1).bucket(torch.arange(129)).unique())


def pair_bias(bias: str) -> str:
    """Compare a bias for pairs of positions with its equation of the positions t and s."""
    from ...positions import build_pair_positions

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = build_pair_positions({"name": bias}, HEADS, owner="papers").double()
    t, s = torch.tensor([[3, 70, 900]]), torch.tensor([[0, 2, 65, 880]])
    return compare_values(built(t, s, torch.float64), _pair_equation(bias, built, t, s))


def _pair_equation(bias: str, built: Any, t: Tensor, s: Tensor) -> Tensor:
    """Compute the equation of a bias for pairs of positions with the parameters of a module."""
    if bias == "alibi":
        return reference.alibi(t, s, slopes=torch.tensor([2.0 ** (-8 * h / HEADS) for h in range(1, HEADS + 1)]))
    if bias == "kerple":
        r1, r2 = built.rates(torch.float64)
        return reference.kerple(t, s, r1=r1, r2=r2)
    if bias == "sandwich":
        return reference.sandwich(t, s, heads=HEADS)
    mlp = {name: getattr(built, name) for name in ("up", "up_bias", "down", "down_bias")}
    return reference.fire(t, s, c=built.c, limit=built.length * built.threshold, **mlp)


def logit_bias(bias: str) -> str:
    """Compare a bias that depends on queries and keys with its equation, in a causal row."""
    from ...positions import build_logit_bias

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        built = build_logit_bias({"name": bias}, HEADS, D, causal=True, owner="papers").double()
        for parameter in built.parameters():
            torch.nn.init.normal_(parameter)
    q, k = draw_tensor(1, HEADS, T, D), draw_tensor(1, HEADS, T, D, seed=1)
    at, seen = torch.arange(T)[None], torch.ones(1, T, T, dtype=torch.bool).tril()
    return compare_values(built(q, k, at, at, seen).tril(), _logit_equation(bias, built, q, k, at, seen).tril())


def _logit_equation(bias: str, built: Any, q: Tensor, k: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Compute the equation of a bias that depends on queries and keys with the parameters of a module."""
    if bias == "shaw":
        return reference.shaw(q, at, at, vectors=built.table)
    if bias == "cope":
        return reference.cope(q, k, seen, vectors=built.table)
    mlp = {name: getattr(built, name) for name in ("up", "up_bias", "down", "down_bias")}
    return reference.cape(q, k, _pair_equation("kerple", built.of, at, at), **mlp)


def _scaled_frequencies(rule: str, **options: object) -> list[float]:
    """Return the frequencies of 64 rotated features at base 10,000 under a rule; "" for none."""
    from ...positions.rotary import scaled_frequencies

    return scaled_frequencies(64, 10_000.0, {"name": rule, **options} if rule else None)[0]


def _compare_frequencies(ours: list[float], theirs: list[float]) -> str:
    """Compare two lists of frequencies."""
    return compare_values(torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64))


def interpolation(factor: float) -> str:
    """Compare the frequencies of position interpolation with those of no rule, divided by the factor."""
    return _compare_frequencies(
        _scaled_frequencies("linear", factor=factor), [theta / factor for theta in _scaled_frequencies("")]
    )


def ntk_base() -> str:
    """Compare the NTK-aware rule by 4 with the base 10,000 * 4^(d / (d - 2))."""
    base = 10_000.0 * 4 ** (64 / 62)
    return _compare_frequencies(_scaled_frequencies("ntk", factor=4.0), [base ** (-2 * m / 64) for m in range(32)])


def yarn_ends() -> str:
    """Compare the fastest and the slowest frequency under YaRN with the old one and a quarter of it."""
    ours, old = _scaled_frequencies("yarn", factor=4.0, original_max_len=2048), _scaled_frequencies("")
    return _compare_frequencies([ours[0], ours[-1]], [old[0], old[-1] / 4])
