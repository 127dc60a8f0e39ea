"""Values that compare: a form of the library with an equation written out, in float64 on random numbers.

Each is "equal", or by how much the two sides differ at most.
"""

from __future__ import annotations

import inspect
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ...errors import MixerError
from ...types import Options
from .claim import mark_stated
from .dotted import find_code

TOLERANCE = 1e-9
B, T, D, HEADS = 2, 9, 8, 2
SIZES = {"B": B, "T": T, "D": D, "H": HEADS}
QKV = {"q": "B T D", "k": "B T D", "v": "B T D"}


def draw_tensor(*shape: int, seed: int = 0) -> Tensor:
    """Draw a tensor in float64 without touching torch's generator."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def qkv() -> list[Tensor]:
    """Draw queries, keys and values."""
    return [draw_tensor(B, T, D, seed=i) for i in range(3)]


def compare_values(ours: Tensor, theirs: Tensor) -> str:
    """Return "equal", or the largest difference in words."""
    off = float((ours - theirs).detach().abs().max())
    return "equal" if off <= TOLERANCE * max(1.0, float(theirs.detach().abs().max())) else f"off by {off:.1e}"


def equal(ours: str, theirs: str, inputs: Options | None = None, **options: object) -> str:
    """Compare a form of the library with its reference, or with another form, on the same inputs.

    Args:
        ours: dotted path of the form below ``tokenmix``.
        theirs: dotted path of the other form.
        inputs: shapes of inputs by the names of parameters, such as "T T", or a list of them for a tuple of tensors;
            q, k and v are there without.
        options: other parameters. Each form gets those inputs and options that it has.
    """
    seeds = count()

    def draw(shape: Any) -> Any:
        if isinstance(shape, list):
            return tuple(map(draw, shape))
        return draw_tensor(*(SIZES.get(n) or int(n) for n in shape.split()), seed=next(seeds))

    given = {name: draw(shape) for name, shape in (QKV | (inputs or {})).items()}
    given |= {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    forms = find_code(ours), find_code(theirs)
    taken = [given.keys() & inspect.signature(form).parameters.keys() for form in forms]
    if unused := given.keys() - QKV.keys() - taken[0] - taken[1]:
        raise MixerError(f"papers: neither {ours} nor {theirs} has a parameter {', '.join(sorted(unused))}.")
    return compare_values(
        *(form(**{name: given[name] for name in names}) for form, names in zip(forms, taken, strict=True))
    )


def aft_rows() -> int:
    """Count the outputs of AFT-full, divided by the gate, that leave the range of the values (Eq. 3)."""
    from ...functional import aft_full

    (q, k, v), w = qkv(), draw_tensor(T, T)
    mean = aft_full(q, k, v, w) / q.sigmoid()
    low, high = v.amin(1, keepdim=True), v.amax(1, keepdim=True)
    return int(((mean < low - TOLERANCE) | (mean > high + TOLERANCE)).sum())


def aft_conv() -> str:
    """Compare AFT-conv with Eq. 6 as printed, convolutions with exp(w) - 1 beside the sums over all tokens."""
    from ...functional import aft_conv

    q, _, v = qkv()
    k, w = draw_tensor(B, T, HEADS), draw_tensor(HEADS, 3)
    e = k.exp().repeat_interleave(D // HEADS, -1)

    def conv(x: Tensor) -> Tensor:
        taps = w.expm1().repeat_interleave(D // HEADS, 0)[:, None]
        return torch.nn.functional.conv1d(x.mT, taps, padding=1, groups=D).mT

    sums = conv(e * v) + (e * v).sum(1, keepdim=True), conv(e) + e.sum(1, keepdim=True)
    return compare_values(aft_conv(q, k, v, w), q.sigmoid() * sums[0] / sums[1])


def aft_conv_start() -> str:
    """Compare a fresh AFT-conv, whose gamma and beta are 0, with AFT-simple on its keys, one per head."""
    from ...functional import aft_simple
    from ...mixers import build_mixer

    mixer: Any = build_mixer("aft_conv", D, heads=HEADS, kernel_size=3, ndim=1).double()
    x = draw_tensor(B, T, D)
    q, k, v = mixer.q_proj(x), mixer.k_proj(x).repeat_interleave(D // HEADS, -1), mixer.v_proj(x)
    return compare_values(mixer(x), mixer.out_proj(aft_simple(q, k, v)))


def hydra_lengths() -> str:
    """Compare Hydra of queries and keys three times as long, and of values twice as long, with twice Hydra."""
    from ...functional import hydra

    q, k, v = qkv()
    return compare_values(hydra(3 * q, 3 * k, 2 * v, eps=0.0), 2 * hydra(q, k, v, eps=0.0))


def polynl() -> str:
    """Compare the mixer PolyNL with Hydra whose queries are the tokens and whose kernel is the mean."""
    from ...functional import hydra
    from ...mixers import build_mixer

    mixer: Any = build_mixer("polynl", D).double()
    x = draw_tensor(B, T, D)
    products = (mixer.k_proj(x) * mixer.v_proj(x)).mean(1, keepdim=True)
    written = mixer.out_proj(x * products)
    hydras = mixer.out_proj(hydra(x, mixer.k_proj(x), mixer.v_proj(x), feature="identity") / T)
    return compare_values(torch.stack([mixer(x), hydras]), torch.stack([written, written]))


def non_local() -> str:
    """Compare a Non-Local block, softmax of its embedded products, with attention of one head and scale 1."""
    from ...functional import attention

    q, k, v = qkv()
    return compare_values(attention(q, k, v, heads=1, scale=1.0), (q @ k.mT).softmax(-1) @ v)


def external_rows() -> str:
    """Compare what a memory of ones reads, the sum of each row of weights, with 1."""
    from ...functional import external

    ones = torch.ones(5, D, dtype=torch.float64)
    read = external(draw_tensor(B, T, D), draw_tensor(5, D), ones, eps=0.0)
    return compare_values(read, torch.ones_like(read))


def dense_rows() -> str:
    """Compare the dense logits of a token before and after all other tokens change."""
    from ...functional.synthesizer import dense_logits

    q, tables, at = draw_tensor(B, T, D), (draw_tensor(HEADS, D // HEADS, T),), torch.arange(T).expand(B, T)
    other = q.clone()
    other[:, 1:] += 1
    return compare_values(dense_logits(other, tables, at, at)[:, :, 0], dense_logits(q, tables, at, at)[:, :, 0])


@mark_stated
def gate_at_start() -> float:
    """Return the weight of the synthetic logits in a fresh gated mixture."""
    from ...mixers import build_mixer

    mixer: Any = build_mixer("synthesizer_mixture", D, heads=1, max_len=T, join="gated")
    return float(mixer.alpha.detach().sigmoid())


def linear_recurrence() -> str:
    """Compare causal linear attention with its recurrence over S and Z."""
    from ...functional import linear_attention

    q, k, v = qkv()
    fq, fk = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    s, z = (fk[..., None] * v[:, :, None]).cumsum(1), fk.cumsum(1)
    theirs = torch.einsum("btd,btde->bte", fq, s) / (fq * z).sum(-1, keepdim=True)
    return compare_values(linear_attention(q, k, v, heads=1, causal=True), theirs)


def set_equivariance() -> str:
    """Compare an induced set attention of permuted tokens with its permuted outputs."""
    from ...mixers import build_mixer

    mixer, x = build_mixer("set", D, points=3, heads=HEADS).double(), draw_tensor(B, T, D)
    order = torch.arange(T - 1, -1, -1)
    return compare_values(mixer(x[:, order]), mixer(x)[:, order])


def heads_are_cuts() -> str:
    """Compare attention of two heads on whole queries, keys and values with one head on each half of the features."""
    from ...functional import attention

    parts = [x.chunk(2, -1) for x in qkv()]
    halves = [attention(*(p[i] for p in parts), heads=1) for i in (0, 1)]
    return compare_values(attention(*qkv(), heads=2), torch.cat(halves, -1))


def future_is_hidden() -> str:
    """Compare the causal output of the first tokens before and after the last one changes."""
    from ...functional import attention

    q, k, v = qkv()
    changed = [torch.cat([x[:, :-1], x[:, -1:] + 1], 1) for x in (q, k, v)]
    first, second = (attention(*given, heads=HEADS, causal=True)[:, :-1] for given in ((q, k, v), changed))
    return compare_values(second, first)


def balanced_bce() -> str:
    """Compare the balanced binary cross-entropy with its equation, on soft targets."""
    from ..train.class_losses import ClassLoss

    counts, z, y = [500, 60, 9, 1], draw_tensor(6, 4), draw_tensor(6, 4, seed=1).softmax(1)
    pi = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    p = (z + pi.log() - (1 - pi).log()).sigmoid()
    written = -(y * p.log() + (1 - y) * (1 - p).log()).sum(1).mean()
    return compare_values(ClassLoss("balanced_bce", counts)(z, y), written)
