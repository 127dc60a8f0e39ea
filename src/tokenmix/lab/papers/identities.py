"""Measures that compare: a form of the library with an equation written out, in float64 on random numbers.

Each returns "equal", or by how much the two sides differ at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TOLERANCE = 1e-9
B, T, D, HEADS = 2, 9, 8, 2


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Draw a tensor in float64 without touching torch's generator."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def qkv() -> list[Tensor]:
    """Draw queries, keys and values."""
    return [drawn(B, T, D, seed=i) for i in range(3)]


def compared(ours: Tensor, theirs: Tensor) -> str:
    """Return "equal", or the largest difference in words."""
    off = float((ours - theirs).detach().abs().max())
    return "equal" if off <= TOLERANCE * max(1.0, float(theirs.detach().abs().max())) else f"off by {off:.1e}"


def weighted(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Write out AFT, Eq. 2: the gated mean of the values with weights exp(k + w)."""
    weights = (k[:, None] + w[..., None]).exp()
    return q.sigmoid() * (weights * v[:, None]).sum(2) / weights.sum(2)


def aft_full() -> str:
    """Compare AFT-full with Eq. 2."""
    from ...functional import aft_full

    (q, k, v), w = qkv(), drawn(T, T)
    return compared(aft_full(q, k, v, w), weighted(q, k, v, w))


def aft_rows() -> int:
    """Count the outputs of AFT-full, divided by the gate, that leave the range of the values (Eq. 3)."""
    from ...functional import aft_full

    (q, k, v), w = qkv(), drawn(T, T)
    mean = aft_full(q, k, v, w) / q.sigmoid()
    low, high = v.amin(1, keepdim=True), v.amax(1, keepdim=True)
    return int(((mean < low - TOLERANCE) | (mean > high + TOLERANCE)).sum())


def aft_local() -> str:
    """Compare AFT-local of window 3 with Eq. 2 and a bias that is 0 where |t - t'| >= 3 (Eq. 4)."""
    from ...functional import aft_local

    (q, k, v), w = qkv(), drawn(T, T)
    far = (torch.arange(T)[:, None] - torch.arange(T)).abs() >= 3
    return compared(aft_local(q, k, v, w, window=3), weighted(q, k, v, w.masked_fill(far, 0.0)))


def aft_local_widest() -> str:
    """Compare AFT-local whose window is the length with AFT-full."""
    from ...functional import aft_full, aft_local

    (q, k, v), w = qkv(), drawn(T, T)
    return compared(aft_local(q, k, v, w, window=T), aft_full(q, k, v, w))


def aft_local_zero() -> str:
    """Compare AFT-local of window 0 with AFT-simple."""
    from ...functional import aft_local, aft_simple

    (q, k, v), w = qkv(), drawn(T, T)
    return compared(aft_local(q, k, v, w, window=0), aft_simple(q, k, v))


def aft_simple() -> str:
    """Compare AFT-simple with Eq. 5, the softmax of the keys over time."""
    from ...functional import aft_simple

    q, k, v = qkv()
    return compared(aft_simple(q, k, v), q.sigmoid() * (k.softmax(1) * v).sum(1, keepdim=True))


def aft_conv() -> str:
    """Compare AFT-conv with Eq. 6 as printed, convolutions with exp(w) - 1 beside the sums over all tokens."""
    from ...functional import aft_conv

    q, _, v = qkv()
    k, w = drawn(B, T, HEADS), drawn(HEADS, 3)
    e = k.exp().repeat_interleave(D // HEADS, -1)

    def conv(x: Tensor) -> Tensor:
        taps = w.expm1().repeat_interleave(D // HEADS, 0)[:, None]
        return torch.nn.functional.conv1d(x.mT, taps, padding=1, groups=D).mT

    sums = conv(e * v) + (e * v).sum(1, keepdim=True), conv(e) + e.sum(1, keepdim=True)
    return compared(aft_conv(q, k, v, w), q.sigmoid() * sums[0] / sums[1])


def aft_conv_start() -> str:
    """Compare a fresh AFT-conv, whose gamma and beta are 0, with AFT-simple on its keys, one per head."""
    from ...functional import aft_simple
    from ...mixers import build_mixer

    mixer: Any = build_mixer("aft_conv", D, heads=HEADS, kernel_size=3, ndim=1).double()
    x = drawn(B, T, D)
    q, k, v = mixer.q_proj(x), mixer.k_proj(x).repeat_interleave(D // HEADS, -1), mixer.v_proj(x)
    return compared(mixer(x), mixer.out_proj(aft_simple(q, k, v)))


def hydra() -> str:
    """Compare Hydra with the sum written out, with the cosine kernel."""
    from ...functional import hydra

    q, k, v = qkv()
    unit = [x / x.norm(dim=-1, keepdim=True) for x in (q, k)]
    return compared(hydra(q, k, v, eps=0.0), torch.einsum("btd,bsd,bsd->btd", *unit, v))


def hydra_lengths() -> str:
    """Compare Hydra of queries and keys three times as long, and of values twice as long, with twice Hydra."""
    from ...functional import hydra

    q, k, v = qkv()
    return compared(hydra(3 * q, 3 * k, 2 * v, eps=0.0), 2 * hydra(q, k, v, eps=0.0))


def hydra_heads() -> str:
    """Compare Hydra with kernel attention of as many heads as features."""
    from ...functional import hydra, multihead_linear

    q, k, v = qkv()
    return compared(hydra(q, k, v), multihead_linear(q, k, v, heads=D))


def hydra_aft() -> str:
    """Compare Hydra of sigmoid queries and softmax keys with AFT-simple."""
    from ...functional import aft_simple, hydra

    q, k, v = qkv()
    return compared(hydra(q, k, v, feature="sigmoid/softmax"), aft_simple(q, k, v))


def external() -> str:
    """Compare External attention with its double normalisation written out."""
    from ...functional import external

    x, memory_k, memory_v = drawn(B, T, D), drawn(5, D), drawn(5, D, seed=1)
    weights = (x @ memory_k.mT).softmax(1)
    weights = weights / weights.sum(2, keepdim=True)
    return compared(external(x, memory_k, memory_v, eps=0.0), weights @ memory_v)


def external_rows() -> str:
    """Compare what a memory of ones reads, the sum of each row of weights, with 1."""
    from ...functional import external

    ones = torch.ones(5, D, dtype=torch.float64)
    read = external(drawn(B, T, D), drawn(5, D), ones, eps=0.0)
    return compared(read, torch.ones_like(read))


def dense_rows() -> str:
    """Compare the dense logits of a token before and after all other tokens change."""
    from ...functional.synthesizer import dense_logits

    q, tables, at = drawn(B, T, D), (drawn(HEADS, D // HEADS, T),), torch.arange(T).expand(B, T)
    other = q.clone()
    other[:, 1:] += 1
    return compared(dense_logits(other, tables, at, at)[:, :, 0], dense_logits(q, tables, at, at)[:, :, 0])


def dense() -> str:
    """Compare the dense form of one head with softmax(W2 relu(W1 x)) times the values."""
    from ...functional import synthesizer_dense

    q, _, v = qkv()
    table = drawn(1, D, T)
    return compared(synthesizer_dense(q, v, (table,)), (q.relu() @ table[0]).softmax(-1) @ v)


def random() -> str:
    """Compare the random form of one head with softmax(R) times the values."""
    from ...functional import synthesizer_random

    v, table = drawn(B, T, D), drawn(1, T, T)
    return compared(synthesizer_random(v, table), table[0].softmax(-1) @ v)


def factorized_random() -> str:
    """Compare the factorised random form with the random form of R1 R2^T."""
    from ...functional import synthesizer_factorized_random, synthesizer_random

    v, factors = drawn(B, T, D), (drawn(1, T, 3), drawn(1, T, 3, seed=1))
    return compared(synthesizer_factorized_random(v, factors), synthesizer_random(v, factors[0] @ factors[1].mT))


def mixture() -> str:
    """Compare a mixture of random logits and dot products with the softmax of the weighted sum of logits."""
    from ...mixers import build_mixer

    mixer: Any = build_mixer("synthesizer_mixture", D, heads=1, max_len=T, qkv_bias=False, out_bias=False).double()
    x, (random_weight, dot_weight) = drawn(B, T, D), (0.3, 0.7)
    with torch.no_grad():
        mixer.alpha.copy_(torch.tensor([random_weight, dot_weight]).log())
    q, k, v = mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)
    logits = mixer.alpha.softmax(0)[0] * mixer.random.weight[0]
    logits = logits + mixer.alpha.softmax(0)[1] * q @ k.mT / math.sqrt(D)
    return compared(mixer(x), mixer.out_proj(logits.softmax(-1) @ v))


def gate_at_start() -> float:
    """Return the weight of the synthetic logits in a fresh gated mixture."""
    from ...mixers import build_mixer

    mixer: Any = build_mixer("synthesizer_mixture", D, heads=1, max_len=T, join="gated")
    return float(mixer.alpha.detach().sigmoid())


def reduced_attention() -> str:
    """Compare spatial reduction on a grid of 4 x 4 with attention whose keys are a normalised strided convolution."""
    from ...contrib import spatial_reduction
    from ...functional import attention

    q, x = drawn(B, 16, D), drawn(B, 16, D, seed=1)
    conv, norm = (drawn(D, D, 2, 2), drawn(D)), (drawn(D, seed=2), drawn(D, seed=3))
    maps = [(drawn(D, D, seed=i), drawn(D, seed=i + 4)) for i in range(2)]
    ours = spatial_reduction(q, x, conv, norm, *maps, heads=HEADS, grid=(4, 4))
    short = torch.nn.functional.conv2d(x.mT.unflatten(2, (4, 4)), *conv, stride=2).flatten(2).mT
    short = torch.nn.functional.layer_norm(short, (D,), *norm)
    return compared(ours, attention(q, *(torch.nn.functional.linear(short, *m) for m in maps), heads=HEADS))


def linear_recurrence() -> str:
    """Compare causal linear attention with its recurrence over S and Z."""
    from ...functional import linear_attention

    q, k, v = qkv()
    fq, fk = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    s, z = (fk[..., None] * v[:, :, None]).cumsum(1), fk.cumsum(1)
    theirs = torch.einsum("btd,btde->bte", fq, s) / (fq * z).sum(-1, keepdim=True)
    return compared(linear_attention(q, k, v, heads=1, causal=True), theirs)


def set_equivariance() -> str:
    """Compare an induced set attention of permuted tokens with its permuted outputs."""
    from ...mixers import build_mixer

    mixer, x = build_mixer("set", D, points=3, heads=HEADS).double(), drawn(B, T, D)
    order = torch.arange(T - 1, -1, -1)
    return compared(mixer(x[:, order]), mixer(x)[:, order])


def heads_are_cuts() -> str:
    """Compare attention of two heads on whole queries, keys and values with one head on each half of the features."""
    from ...functional import attention

    parts = [x.chunk(2, -1) for x in qkv()]
    return compared(
        attention(*qkv(), heads=2), torch.cat([attention(*(p[i] for p in parts), heads=1) for i in (0, 1)], -1)
    )


def attention() -> str:
    """Compare attention of one head with softmax(Q K^T / sqrt(d)) V."""
    from ...functional import attention

    q, k, v = qkv()
    return compared(attention(q, k, v, heads=1), (q @ k.mT / math.sqrt(D)).softmax(-1) @ v)


def future_is_hidden() -> str:
    """Compare the causal output of the first tokens before and after the last one changes."""
    from ...functional import attention

    q, k, v = qkv()
    changed = [torch.cat([x[:, :-1], x[:, -1:] + 1], 1) for x in (q, k, v)]
    first, second = (attention(*given, heads=HEADS, causal=True)[:, :-1] for given in ((q, k, v), changed))
    return compared(second, first)


def rotary_is_relative() -> str:
    """Compare products of rotated queries and keys at positions 3 and 5 with those at 103 and 105."""
    from ...positions import RotaryPositions

    rotary, (q, k, _) = RotaryPositions(D), (x[:1, :1] for x in qkv())

    def product(i: int, j: int) -> Tensor:
        return (rotary(torch.tensor([[i]]), q)[0] * rotary(torch.tensor([[j]]), k)[0]).sum()

    return compared(product(103, 105), product(3, 5))


def pair_bias(name: str, equation: Callable[[Any, Tensor, Tensor], Tensor], **options: Any) -> Callable[[], str]:
    """Return a measure that compares a bias for pairs of positions with its equation of the positions t and s."""

    def measure() -> str:
        from ...positions import build_pair_positions

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            bias = build_pair_positions({"name": name, **options}, HEADS, owner="papers").double()
        t, s = torch.tensor([[3, 70, 900]]), torch.tensor([[0, 2, 65, 880]])
        far = (t[:, :, None] - s[:, None])[:, None].double()
        return compared(bias(t, s, torch.float64), equation(bias, far, t[:, None, :, None].double()))

    return measure


def t5_bucket_count() -> int:
    """Count the buckets that T5's bias gives to distances 0 .. 128 at its defaults."""
    from ...positions import T5Bias

    return len(T5Bias(1).bucket(torch.arange(129)).unique())


def alibi(bias: Any, far: Tensor, _: Tensor) -> Tensor:
    """Write out ALiBi: m_h (j - i), m_h = 2^(-8 h / H), for keys before the query."""
    return -torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)]).view(-1, 1, 1) * far.abs()


def kerple(bias: Any, far: Tensor, _: Tensor) -> Tensor:
    """Write out KERPLE's logarithmic form with the module's own r1 and r2."""
    r1, r2 = (r.view(-1, 1, 1) for r in bias.rates(torch.float64))
    return -r1 * (1 + r2 * far.abs()).log()


def sandwich(bias: Any, far: Tensor, _: Tensor) -> Tensor:
    """Write out the products of sinusoids, less those at distance 0, with our factor of each head."""
    waves = sum((far * 10_000 ** (-2 * i / 128)).cos() - 1 for i in range(1, 65))
    return torch.tensor([8 * (h + 1) / HEADS / 128 for h in range(HEADS)]).view(-1, 1, 1) * waves


def fire(bias: Any, far: Tensor, t: Tensor) -> Tensor:
    """Write out FIRE's MLP of psi(i - j) / psi(max(L, i)) with the module's own weights."""
    limit = bias.length * bias.threshold
    ratio = (bias.c * far.abs() + 1).log() / ((bias.c * torch.maximum(t, limit) + 1).log() + 1e-6)
    hidden = (ratio[..., None] * bias.up + bias.up_bias).clamp_min(0)
    return (hidden @ bias.down.T + bias.down_bias)[:, 0].movedim(-1, 1)


def scaled(rule: str, **options: Any) -> list[float]:
    """Return the frequencies of 64 rotated features at base 10,000 under a rule; "" for none."""
    from ...positions.rotary import scaled_frequencies

    return scaled_frequencies(64, 10_000.0, {"name": rule, **options} if rule else None)[0]


def listed(ours: list[float], theirs: list[float]) -> str:
    """Compare two lists of frequencies."""
    return compared(torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64))


def interpolation_by_one() -> str:
    """Compare position interpolation to the trained length with no rule."""
    return listed(scaled("linear", factor=1.0), scaled(""))


def interpolation() -> str:
    """Compare position interpolation by 4 with a quarter of each frequency."""
    return listed(scaled("linear", factor=4.0), [theta / 4 for theta in scaled("")])


def ntk_base() -> str:
    """Compare the NTK-aware rule by 4 with the base 10,000 * 4^(d / (d - 2))."""
    base = 10_000.0 * 4 ** (64 / 62)
    return listed(scaled("ntk", factor=4.0), [base ** (-2 * m / 64) for m in range(32)])


def yarn_ends() -> str:
    """Compare the fastest and the slowest frequency under YaRN with the old one and a quarter of it."""
    ours, old = scaled("yarn", factor=4.0, original_max_len=2048), scaled("")
    return listed([ours[0], ours[-1]], [old[0], old[-1] / 4])


def sinusoids() -> str:
    """Compare the fixed positions of EAMLP with sines and cosines written out."""
    from ...models.eamlp import sinusoids

    table = [[(math.sin, math.cos)[i % 2](t / 10_000 ** ((i - i % 2) / 6)) for i in range(6)] for t in range(7)]
    off = float((sinusoids(7, 6).double() - torch.tensor(table, dtype=torch.float64)).abs().max())
    return "equal" if off < 1e-6 else f"off by {off:.1e}"
