"""Fuzz every functional form of the core but AFT (``test_fuzz``) against the float64 reference.

Random calls; values, and gradients of every argument. A family has 500 calls in float64, where any wrong term shows.
Every fourth is run again in float32, whose error is measured as the contract measures it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tokenmix import MIXERS, contrib, functional
from tokenmix import reference as R
from tokenmix.functional.linear import LOG_FEATURES
from tokenmix.functional.sums.kernel_attention import MAPS
from tokenmix.functional.synthesizer import JOINS, LOGITS
from tokenmix.testing.tolerances import ADVERSARIAL, LOGIT_EPS

CALLS, BATCH = 500, 25
EXACT = 1e-9  # float64 on both sides, relative to the largest number of the result
# Of an output by a relative change of an argument: what a gradient that is zero, as along a unit vector, is rounded
# against.
ROUNDING = 1e-14
SIZES = {
    "normal": lambda a: a,
    "wide": lambda a: 30 * a,
    "tiny": lambda a: 1e-6 * a,
    "spike": lambda a: a + 90 * (torch.arange(a.shape[1]) == a.shape[1] // 2)[None, :, None],
    "ramp": lambda a: torch.linspace(-90, 90, a.shape[1], dtype=a.dtype)[None, :, None] + a,
    "fall": lambda a: torch.linspace(90, -90, a.shape[1], dtype=a.dtype)[None, :, None] + a,
}


class Call(NamedTuple):
    """One call: the form's name, its arguments in float64, what both sides are told, and what only ours is."""

    form: str
    args: tuple
    shared: dict[str, Any]
    causal: bool = False
    key_mask: Tensor | None = None
    attn_mask: Tensor | None = None
    loud: int = 2  # which argument holds the values that are averaged
    row: str = ""  # of MIXERS, for its largest logit


class Draw:
    """Random shapes, masks and tensors of one call."""

    def __init__(self, seed: int, *, cross: bool = True, wide: int = 70):
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.B, self.heads, self.e = self.rng.randint(1, 3), self.rng.choice([1, 2, 3]), self.rng.choice([1, 2, 4])
        self.T = self.rng.choice([1, 2, 3, 5, 8, 9, 13] + [17, 33, wide] * (self.rng.random() < 0.2))
        self.causal = self.rng.random() < 0.4
        crosses = cross and not self.causal and self.rng.random() < 0.4
        self.S = self.rng.choice([1, 2, 4, 7, 11]) if crosses else self.T
        self.D = self.heads * self.e
        p = self.rng.choice([None, 0.0, 0.2, 0.8])
        self.key_mask = None if p is None else torch.rand(self.B, self.S, generator=self.generator) < p
        self.masks = {"causal": self.causal, "key_mask": self.key_mask}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def sized(self, *shape: int) -> Tensor:
        return SIZES[self.rng.choice(list(SIZES))](self.normal(*shape))

    def pairs(self) -> Tensor | None:
        shape = self.rng.choice([None, (self.T, self.S), (self.B, self.T, self.S)])
        return None if shape is None else torch.rand(shape, generator=self.generator) < 0.6

    def positions(self, limit: int, length: int) -> Tensor:
        order = torch.rand(self.B, limit, generator=self.generator).argsort(1)[:, :length]
        return order if self.rng.random() < 0.2 else order.sort(1).values

    def one(self, *options: Any) -> Any:
        return self.rng.choice(options)


def hydra(seed: int) -> Call:
    d = Draw(seed)
    feature = d.one(*MAPS, f"{d.one(*MAPS)}/{d.one(*MAPS)}")
    normalise = d.one(True, False) and not feature.endswith("softmax")
    shared = {"feature": feature, "normalise": normalise, "eps": d.one(1e-6, 1e-3, 0.0)}
    args = d.normal(d.B, d.T, d.D), d.sized(d.B, d.S, d.D), d.normal(d.B, d.S, d.D)
    if d.one(True, False):
        return Call("hydra", args, shared, **d.masks, row="hydra")
    return Call(
        "multihead_linear", args, {**shared, "heads": d.one(1, d.heads, d.D)}, **d.masks, row="multihead_linear"
    )


def external(seed: int) -> Call:
    d = Draw(seed, cross=seed % 4 == 0)
    if seed % 4 == 0:
        k = d.normal(d.B, d.S, d.D)
        return Call(
            "simplified_attention",
            (k if d.S == d.T else d.normal(d.B, d.T, d.D), k),
            {"scale": d.one(1.0, 0.1, 5.0)},
            **d.masks,
            attn_mask=d.pairs(),
            loud=1,
            row="simplified_attention",
        )
    slots = d.one(1, 2, 5, 17)
    memory_k, memory_v = d.normal(slots, d.e), d.normal(slots, d.e)
    biases = (d.normal(slots), d.normal(d.e)) if d.one(True, False) else ()
    shared = {
        "heads": d.heads,
        "norm": d.one("double", "double", "tokens", "slots"),
        "eps": d.one(1e-9, 1e-9, 0.0, 0.1),
    }
    return Call("external", (d.sized(d.B, d.T, d.D), memory_k, memory_v, *biases), shared, **d.masks, row="external")


def synthesizer(seed: int) -> Call:
    d = Draw(seed, cross=False, wide=40)
    N, G = d.T + d.one(0, 1, 6), d.one(1, d.heads)
    shared: dict[str, Any] = {"positions": d.positions(N, d.T) if d.one(True, False) else None}
    q, v = d.sized(d.B, d.T, d.D), d.normal(d.B, d.T, d.heads * d.one(1, 3))
    a = d.one(1, 2, 3, N, N + 1)
    b, biased = -(-N // a), d.one(True, False)
    tables = {
        "dense": (d.normal(G, d.e, N), d.normal(G, N))[: 1 + biased],
        "random": (10 * d.normal(G, N, N),),
        "factorized_dense": (d.normal(G, d.e, a), d.normal(G, d.e, b), d.normal(G, a), d.normal(G, b))[
            : 2 + 2 * biased
        ],
        "factorized_random": (d.normal(G, N, 3), d.normal(G, N, 3)),
    }
    masks = {**d.masks, "attn_mask": d.pairs()}
    kind = d.one(*LOGITS, "mixture")
    row = f"synthesizer_{kind}"
    if kind in ("dense", "factorized_dense"):
        return Call(row, (q, v, tables[kind]), {**shared, "rectify": d.one(True, False)}, **masks, loud=1, row=row)
    if kind != "mixture":  # one table for all heads makes one head of them
        table = tables[kind]
        return Call(row, (v, table[0] if kind == "random" else table), shared, **masks, loud=0, row=row)
    join = d.one(*JOINS)
    names = ["attention", *LOGITS]
    d.rng.shuffle(names)
    parts = names[: d.rng.randint(1, 5)]
    if join == "gated" or not ({"attention", "dense", "factorized_dense"} & set(parts)):
        parts = ["attention", *(p for p in parts if p != "attention"), *(("random",) if parts == ["attention"] else ())]
    count = {"softmax": len(parts), "gated": 1, "plus": 0}[join]
    alpha = d.normal(d.heads, count) if count and d.one(True, False) else d.normal(count)
    v = d.normal(d.B, d.T, d.heads * d.one(1, 3))
    taken = tuple(tables[name] if name in parts else () for name in LOGITS)
    shared |= {"parts": parts, "join": join, "heads": d.heads, "scale": d.one(None, 1.0)}
    return Call(row, (q, d.normal(d.B, d.T, d.D), v, alpha, *taken), shared, **masks, row=row)


def linear(seed: int) -> Call:
    d = Draw(seed)
    shared = {"heads": d.heads, "feature": d.one(*LOG_FEATURES)}
    return Call(
        "linear_attention",
        (d.sized(d.B, d.T, d.D), d.sized(d.B, d.S, d.D), d.normal(d.B, d.S, d.D)),
        shared,
        **d.masks,
        row="linear",
    )


def performer(seed: int) -> Call:
    d = Draw(seed)
    shared = {"heads": d.heads, "feature": d.one("softmax", "relu"), "eps": d.one(1e-3, 0.1)}
    args = (
        d.sized(d.B, d.T, d.D),
        d.sized(d.B, d.S, d.D),
        d.normal(d.B, d.S, d.D),
        d.normal(d.heads, d.one(1, 3, 8), d.e),
    )
    return Call("performer", args, shared, **d.masks, row="performer")


def rfa(seed: int) -> Call:
    d = Draw(seed, wide=40)
    shared = {"heads": d.heads, "feature": d.one("gaussian", "arccos"), "eps": d.one(0.01, 0.2)}
    args = (
        d.sized(d.B, d.T, d.D),
        d.sized(d.B, d.S, d.D),
        d.normal(d.B, d.S, d.D),
        d.normal(d.heads, d.one(1, 3, 8), d.e),
        d.normal(d.heads, d.e),
    )
    return Call(
        "rfa", (*args, d.sized(d.B, d.S, d.heads)) if d.one(True, False) else args, shared, **d.masks, row="rfa"
    )


def local(seed: int) -> Call:
    d = Draw(seed)
    places = (d.positions(2 * d.T, d.T), d.positions(2 * d.S, d.S)) if d.S != d.T or d.one(True, False) else None
    shared = {
        "window": d.one(1, 2, 3, 9, 16, 17, 200),
        "heads": d.heads,
        "outside": d.one("none", "pool"),
        "positions": places,
    }
    args = d.normal(d.B, d.T, d.D), d.sized(d.B, d.S, d.D), d.normal(d.B, d.S, d.D)
    return Call("local", args, shared, **d.masks, attn_mask=d.pairs(), row="local")


FAMILIES: dict[str, Callable[[int], Call]] = {
    f.__name__: f for f in (hydra, external, synthesizer, linear, performer, rfa, local)
}


def visible(c: Call) -> Tensor | None:
    """All masks as one (B, T, S), None where everything may be attended."""
    first = c.args[0]
    B, T, S = (
        first.shape[0],
        first.shape[1],
        first.shape[1] if c.row.startswith(("external", "synthesizer")) else c.args[1].shape[1],
    )
    ok = torch.ones(B, T, S, dtype=torch.bool)
    ok = ok.tril() if c.causal else ok
    ok = ok if c.key_mask is None else ok & c.key_mask[:, None]
    ok = ok if c.attn_mask is None else ok & c.attn_mask
    return None if bool(ok.all()) else ok


def ours(c: Call, args: tuple) -> Tensor:
    pairs = {} if c.attn_mask is None else {"attn_mask": c.attn_mask}
    form = getattr(functional, c.form, None) or getattr(contrib, c.form)
    return form(*args, **c.shared, causal=c.causal, key_mask=c.key_mask, **pairs)


def written(c: Call, args: tuple) -> Tensor:
    return getattr(R, c.form)(*args, **c.shared, mask=visible(c))


def leaves(args: tuple) -> list[Tensor]:
    return [a.requires_grad_() for a in pytree.tree_leaves(args)]


def copied(args: tuple, dtype: torch.dtype) -> tuple:
    return pytree.tree_map(lambda a: a.detach().to(dtype, copy=True), args)


def near(got: Tensor, want: Tensor, most: float | Tensor, what: str) -> None:
    """Finite, and nowhere more than ``most`` away."""
    assert got.shape == want.shape, f"{what}: of shape {tuple(got.shape)}, not {tuple(want.shape)}"
    assert bool(got.isfinite().all()), f"{what}: not finite"
    off = (got - want).detach().abs()
    assert bool((off <= most).all()), (
        f"{what}: off by {float(off.max()):.3g}, at most {float(torch.as_tensor(most).min()):.3g} allowed"
    )


def check_exact(c: Call) -> None:
    """Values and all gradients in float64."""
    one, two = (copied(c.args, torch.float64) for _ in range(2))
    both = leaves(one), leaves(two)
    got, want = ours(c, one), written(c, two)
    near(got, want, EXACT * max(1.0, float(want.detach().abs().max())), "output")
    weight = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grads = [
        torch.autograd.grad((y * weight).sum(), a, allow_unused=True) for y, a in zip((got, want), both, strict=True)
    ]
    scale = max([1.0, *(float(g.abs().max()) for g in grads[1] if g is not None and g.numel())])
    for i, (a, *pair) in enumerate(zip(both[0], *grads, strict=True)):
        most = EXACT * scale + ROUNDING / a.detach().abs()
        near(*(torch.zeros_like(a) if g is None else g for g in pair), most, f"gradient of tensor {i}")


def check_float32(c: Call) -> None:
    """Values in float32, over the sum of weight times |value|."""
    args = copied(c.args, torch.float32)
    exact = copied(args, torch.float64)
    got, want = ours(c, args), written(c, exact)
    loud = written(c, (*exact[: c.loud], exact[c.loud].abs(), *exact[c.loud + 1 :])).abs().amax(-1, keepdim=True)
    told = {**c.shared, "causal": c.causal, "key_mask": c.key_mask, "attn_mask": c.attn_mask}
    tol = ADVERSARIAL + LOGIT_EPS * MIXERS[c.row].largest_logit(exact, told)
    unit = torch.where(loud > 1e-30, loud, 1.0)
    assert got.dtype == torch.float32
    near(got.double() / unit, want / unit, tol, "float32 output over sum(weight |v|)")


@pytest.mark.parametrize("batch", range(CALLS // BATCH))
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, batch):
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        call = FAMILIES[family](seed)
        try:
            check_exact(call)
            if seed % 4 == 1:
                check_float32(call)
        except AssertionError as error:
            shapes = pytree.tree_map(lambda a: tuple(a.shape), call.args)
            raise AssertionError(
                f"seed {seed}: {call.form}{shapes} {call.shared} causal={call.causal} key_mask={call.key_mask}: {error}"
            ) from None
