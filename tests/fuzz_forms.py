"""Draw random calls of every functional form that has, or is to have, a kernel.

One table serves the fuzz against eager and the sanitizers. A new kernel joins with a row of ``FORMS``: name -> function
of a ``Draw`` that gives the arguments, in float64, and the options.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix import MIXERS, functional
from tokenmix.errors import MixerError
from tokenmix.functional.linear import LOG_FEATURES
from tokenmix.functional.sums.kernel_attention import MAPS
from tokenmix.testing.inputs import KEYS
from tokenmix.testing.subject import roles
from tokenmix.testing.tolerances import ADVERSARIAL, LOGIT_EPS

DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16)
# Of a number on its way through half precision: argument of the gate, its product, gradients into and out of the
# kernel.
ROUNDINGS = 4
ODD = {"cosine", "tanh", "identity", "mean"}  # maps of Hydra whose sign is that of their argument
EDGES = (0, 1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200)
QUADRATIC = 1_000_000  # B T S D of forms whose eager form looks at every pair

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "own": lambda a: a.clone(),
    "part of a fused projection": lambda a: torch.cat([a, a, a], -1)[..., a.shape[-1] : 2 * a.shape[-1]],
    "channels first": lambda a: a.transpose(-1, -2).contiguous().transpose(-1, -2),
    "time first": lambda a: a.transpose(0, 1).contiguous().transpose(0, 1),
    "every second feature": lambda a: torch.stack([a, a], -1).flatten(-2)[..., ::2],
    "every second token": lambda a: torch.stack([a, a], -2).flatten(-3, -2)[..., ::2, :],
    "from the middle of a longer text": lambda a: torch.cat([a, a], -2)[
        ..., a.shape[-2] // 2 : a.shape[-2] // 2 + a.shape[-2], :
    ].copy_(a),
}
"""How an argument can lie in memory: the same numbers in each."""


class Draw:
    """The random choices of one call."""

    def __init__(self, seed: int, *, most: int = 200, wide: int = 140):
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.seed, self.most, self.wide = seed, most, wide
        self.dtype = self.one(*DTYPES)
        self.B = self.one(0, 1, 1, 2, 2, 3, 4)
        self.heads = self.one(1, 2, 3, 4, 8)
        self.e = max(1, self.size(wide // self.heads))
        self.T = self.size(most)
        self.causal = self.one(True, False)
        self.S = self.T

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def size(self, most: int) -> int:
        return self.one(*(n for n in EDGES if n <= most)) if self.rng.random() < 0.4 else self.rng.randint(0, most)

    def crossing(self) -> None:
        """Other keys than queries, now and then, where the form is not causal."""
        if not self.causal and self.rng.random() < 0.3:
            self.S = self.size(self.most)

    def bounded(self) -> None:
        """Small enough for eager forms over all pairs."""
        while self.B * self.T * self.S * self.heads * self.e > QUADRATIC:
            if self.e > 8:
                self.e //= 2
            else:
                self.T, self.S = (max(1, 2 * n // 3) for n in (self.T, self.S))

    @property
    def D(self) -> int:
        return self.heads * self.e

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int, most: float) -> Tensor:
        return (2 * torch.rand(shape, generator=self.generator, dtype=torch.float64) - 1) * most

    def keys(self, *shape: int) -> Tensor:
        """A pattern of keys at a size up to 1e4."""
        if 0 in shape:
            return torch.zeros(shape, dtype=torch.float64)
        return KEYS[self.one(*KEYS)](shape, self.seed, self.one(1.0, 10.0, 100.0, 1e4)).clone()

    def queries(self, *shape: int) -> Tensor:
        return self.normal(*shape, scale=self.one(1.0, 1.0, 30.0))

    def logs(self, *shape: int) -> Tensor:
        """Log-weights up to +-60."""
        return self.uniform(*shape, most=self.one(0.1, 1.0, 10.0, 60.0))

    def masks(self) -> dict[str, Any]:
        """``causal`` and, more often than not, a key mask; whole rows of it may be False."""
        S, index = self.S, torch.arange(self.S)
        kind = self.one("none", "none", "random", "few", "left", "right", "holes", "nothing", "all")
        rows = {
            "random": lambda: torch.rand(self.B, S, generator=self.generator) < 0.7,
            "few": lambda: torch.rand(self.B, S, generator=self.generator) < 0.05,
            "left": lambda: index >= torch.randint(0, S + 1, (self.B, 1), generator=self.generator),
            "right": lambda: index < torch.randint(0, S + 1, (self.B, 1), generator=self.generator),
            "holes": lambda: (index % self.one(2, 3, 5) != 0).expand(self.B, S).clone(),
            "nothing": lambda: torch.zeros(self.B, S, dtype=torch.bool),
            "all": lambda: torch.ones(self.B, S, dtype=torch.bool),
        }
        return {"causal": self.causal, "key_mask": None if kind == "none" else self.placed(rows[kind]())}

    def placed(self, mask: Tensor) -> Tensor:
        """The mask in some layout."""
        return self.one(
            mask, mask, torch.stack([mask, ~mask], -1)[..., 0], mask.T.contiguous().T, mask[:1].expand_as(mask)
        )

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.queries(self.B, self.T, self.D),
            self.keys(self.B, self.S, self.D),
            self.normal(self.B, self.S, self.D),
        )

    def gate(self) -> str | None:
        return self.one("sigmoid", "sigmoid", None, "tanh")

    def window(self) -> int:
        return self.one(1, 2, 3, 8, 16, 31, 32, 33, 64, 100, max(1, self.T - 1), self.T + 1, self.T + 30)


Drawn = tuple[tuple, dict[str, Any]]


def aft_simple(d: Draw) -> Drawn:
    d.crossing()
    return d.qkv(), {**d.masks(), "gate": d.gate()}


def aft_forget(d: Draw) -> Drawn:
    size = d.one(1e-6, 0.01, 1.0, 30.0, 1e4)
    decays = -d.uniform(d.B, d.T, d.D, most=size).abs()
    return (*d.qkv(), decays), {**d.masks(), "gate": d.gate()}


def aft_forget_norm(d: Draw) -> Drawn:
    """Values of two signs and heads of several features, as a norm of what cancels has no bound on its error."""
    args, options = aft_forget(d)
    loud = torch.where(torch.arange(d.D) % 2 == 0, 2.0, -2.0)
    heads = d.heads if d.e > 1 else 1 if d.D > 1 else None
    return (*args[:2], args[2].clamp(-1.0, 1.0) + loud, args[3]), {**options, "heads": heads, "eps": d.one(1e-6, 0.1)}


def aft_pairs(d: Draw) -> Drawn:
    rank, size = d.one(1, 2, 4, 7), d.one(0.01, 1.0, 30.0, 1e3)
    d.e = min(d.e, 64)
    a, b = (d.logs(d.B, d.T, d.heads, rank) for _ in range(2))
    g = -d.uniform(d.B, d.T, d.heads, rank, most=size).abs()
    return (*d.qkv(), a, b, g), {**d.masks(), "gate": d.gate()}


def _factors(d: Draw, T: int, S: int, *batch: int) -> tuple[Tensor, Tensor]:
    rank, size = d.one(1, 2, 5, 16), d.one(0.1, 1.0, 10.0, 60.0)
    return tuple(d.uniform(*batch, n, rank, most=(size / rank) ** 0.5) for n in (T, S))


def aft_full_dense(d: Draw) -> Drawn:
    d.crossing()
    d.bounded()
    return (*d.qkv(), d.logs(d.T, d.S)), {**d.masks(), "gate": d.gate()}


def aft_full_factors(d: Draw) -> Drawn:
    d.crossing()
    d.bounded()
    return (*d.qkv(), _factors(d, d.T, d.S)), {**d.masks(), "gate": d.gate()}


def aft_full_batched(d: Draw) -> Drawn:
    d.crossing()
    d.bounded()
    w = d.logs(d.B, d.T, d.S) if d.one(True, False) else _factors(d, d.T, d.S, d.B)
    return (*d.qkv(), w), {**d.masks(), "gate": d.gate()}


def aft_local(d: Draw) -> Drawn:
    d.bounded()
    w = d.logs(d.T, d.T) if d.one(True, False) else _factors(d, d.T, d.T)
    return (*d.qkv(), w), {
        **d.masks(),
        "gate": d.gate(),
        "window": d.window(),
        "outside": d.one("zero", "zero", "none"),
    }


def _conv(d: Draw) -> tuple[Tensor, Tensor, Tensor]:
    return d.queries(d.B, d.T, d.D), d.keys(d.B, d.T, d.heads), d.normal(d.B, d.T, d.D)


def aft_conv(d: Draw) -> Drawn:
    d.bounded()
    return (*_conv(d), d.logs(d.heads, d.one(1, 3, 5, 31, 63, 129))), {
        **d.masks(),
        "gate": d.gate(),
        "outside": d.one("zero", "zero", "none"),
    }


def aft_conv_2d(d: Draw) -> Drawn:
    d.causal, d.e = False, min(d.e, 16)
    height, width, prefix, size = d.rng.randint(1, 9), d.rng.randint(1, 9), d.one(0, 0, 1, 2), d.one(1, 3, 5, 11)
    d.T = d.S = height * width + prefix
    d.e = max(1, min(d.e, QUADRATIC // max(1, d.B * d.T * d.T * d.heads)))
    kernel = d.logs(d.heads, size, size)
    return (*_conv(d), kernel), {
        **d.masks(),
        "gate": d.gate(),
        "outside": d.one("zero", "zero", "none"),
        "grid": (height, width),
        "prefix": prefix,
    }


def hydra(d: Draw) -> Drawn:
    d.crossing()
    feature = d.one("cosine", "cosine", *MAPS, f"{d.one(*MAPS)}/{d.one(*MAPS)}")
    normalise = d.one(True, False) and not feature.endswith("softmax")
    return d.qkv(), {**d.masks(), "feature": feature, "normalise": normalise, "eps": d.one(1e-6, 1e-3)}


def linear_attention(d: Draw) -> Drawn:
    d.crossing()
    d.bounded()
    return d.qkv(), {**d.masks(), "heads": d.heads, "feature": d.one("elu", "elu", *LOG_FEATURES)}


def external(d: Draw) -> Drawn:
    slots = d.one(1, 2, 7, 16, 64)
    biases = (d.normal(slots), d.normal(d.e)) if d.one(True, False) else ()
    args = (d.keys(d.B, d.T, d.D), d.normal(slots, d.e), d.normal(slots, d.e), *biases)
    return args, {
        **d.masks(),
        "heads": d.heads,
        "norm": d.one("double", "double", "tokens", "slots"),
        "eps": d.one(1e-9, 0.0, 0.1),
    }


class Form(NamedTuple):
    """A functional form, the mixer that knows how large its logits get, and what draws a call.

    Where no argument is called v: the one that is averaged, and the two whose products are the logits.
    """

    function: Callable[..., Tensor]
    row: str
    draw: Callable[[Draw], Drawn]
    averaged: int | None = None
    product: tuple[int, int] | None = None


FORMS: dict[str, Form] = {
    "aft_simple": Form(functional.aft_simple, "aft_simple", aft_simple),
    "aft_forget": Form(functional.aft_forget, "aft_forget", aft_forget),
    "aft_forget norm": Form(functional.aft_forget, "aft_forget", aft_forget_norm),
    "aft_pairs": Form(functional.aft_pairs, "aft_pairs", aft_pairs),
    "aft_full dense": Form(functional.aft_full, "aft_full", aft_full_dense),
    "aft_full factors": Form(functional.aft_full, "aft_full", aft_full_factors),
    "aft_full batched": Form(functional.aft_full, "aft_full", aft_full_batched),
    "aft_local": Form(functional.aft_local, "aft_local", aft_local),
    "aft_conv 1-D": Form(functional.aft_conv, "aft_conv", aft_conv),
    "aft_conv 2-D": Form(functional.aft_conv, "aft_conv", aft_conv_2d),
    "hydra": Form(functional.hydra, "hydra", hydra),
    "linear_attention": Form(functional.linear_attention, "linear", linear_attention),
    "external": Form(functional.external, "external", external, averaged=2, product=(0, 1)),
}

MISSING: set[str] = set()
"""Forms without a C kernel: each call of them on backend="cpu" is refused."""

LACKS: dict[str, tuple[str, ...]] = {
    "aft_forget": ("its kernel is causal",),
    "aft_forget norm": ("its kernel is causal",),
    "aft_pairs": ("its kernel is causal",),
    "aft_local": ("take outside='zero' only",),
    "aft_conv 1-D": ("take no positions and only outside='zero'",),
    "aft_conv 2-D": ("take no positions and only outside='zero'",),
    "linear_attention": ("has no feature=",),
    "external": ("has no causal form", "has no norm='slots'"),
}
"""List form -> parts of the messages with which its kernel refuses some of these calls.

Whatever else it refuses is a failure.
"""


def flat(args: tuple) -> list[Tensor]:
    return [leaf for a in args for leaf in (a if isinstance(a, tuple) else (a,))]


def mapped(args: tuple, change: Callable[[Tensor], Tensor]) -> tuple:
    return tuple(tuple(map(change, a)) if isinstance(a, tuple) else change(a) for a in args)


def drawn(name: str, seed: int, **limits: int) -> tuple[Draw, tuple, tuple, dict[str, Any]]:
    """Draw one call: its choices, two copies of its arguments, and the options.

    The first copy is what the kernel gets (dtype, layout, rubbish under the mask); the second holds the same numbers in
    float64.
    """
    d = Draw(seed, **limits)
    args, options = FORMS[name].draw(d)
    exact = mapped(args, lambda a: a.to(d.dtype).double())
    given, mask = exact, options["key_mask"]
    if mask is not None and not bool(mask.all()) and d.one(True, False, False):
        at, values, _ = roles(FORMS[name].function)
        rubbish = d.one(float("nan"), torch.finfo(d.dtype).max, -torch.finfo(d.dtype).max)
        hidden = {at, at if values is None else values}
        given = tuple(torch.where(mask[..., None], a, rubbish) if i in hidden else a for i, a in enumerate(given))
    elif d.B > 1 and d.rng.random() < 0.1:  # one row for all of the batch, without memory of its own
        exact = mapped(exact, lambda a: a[:1].expand_as(a) if a.ndim == 3 and a.shape[0] == d.B else a)
        return (
            d,
            mapped(exact, lambda a: a[:1].to(d.dtype).expand_as(a) if a.stride(0) == 0 else a.to(d.dtype)),
            exact,
            options,
        )
    return (
        d,
        mapped(given, lambda a: LAYOUTS[d.one(*LAYOUTS)](a.to(d.dtype)) if a.ndim == 3 else a.to(d.dtype)),
        exact,
        options,
    )


def derived(
    name: str, args: tuple, options: dict[str, Any], g: Tensor | None, backend: str
) -> tuple[Tensor, list[Tensor]]:
    """Output, and the gradient of every argument, of a sum weighted by g."""
    leaves = mapped(args, lambda a: a.detach().requires_grad_())
    y = FORMS[name].function(*leaves, **options, backend=backend)
    g = torch.ones_like(y) if g is None else g
    grads = (
        torch.autograd.grad(y, flat(leaves), g.to(y.dtype), allow_unused=True)
        if y.requires_grad
        else [None] * len(flat(leaves))
    )
    return y.detach(), [torch.zeros_like(a) if g is None else g for g, a in zip(grads, flat(leaves), strict=True)]


def upstream(d: Draw, y: Tensor) -> Tensor:
    """A gradient of the output, in some layout, that of a sum included, which has no memory."""
    if d.one(True, False, False):
        return torch.ones((), dtype=d.dtype).expand(y.shape)
    return LAYOUTS[d.one(*LAYOUTS)](d.normal(*y.shape).to(d.dtype))


def check(name: str, seed: int, backend: str = "cpu") -> str:
    """Run one call on a backend and eagerly in float64: "same", or why the backend refused it.

    AssertionError where they differ.
    """
    d, args, exact, options = drawn(name, seed)
    try:
        g = upstream(d, args[0])
        y, grads = derived(name, args, options, g, backend)
        want, wanted = derived(name, exact, options, g, "eager")
        _compare(name, d, y, grads, want, wanted, exact, options)
    except MixerError as why:
        return str(why)
    except Exception as error:
        shapes = mapped(args, lambda a: (tuple(a.shape), a.stride()))
        mask = (
            None
            if options["key_mask"] is None
            else f"{int(options['key_mask'].sum())} of {options['key_mask'].numel()}"
        )
        told = {**options, "key_mask": mask}
        raise AssertionError(
            f"{name}, seed {seed}: {d.dtype} {shapes} {told}: {type(error).__name__}: {error}"
        ) from error
    return "same"


def _compare(
    name: str,
    d: Draw,
    y: Tensor,
    grads: list[Tensor],
    want: Tensor,
    wanted: list[Tensor],
    exact: tuple,
    options: dict[str, Any],
) -> None:
    """Compare outputs and gradients by the contract's measures.

    Outputs over sum(weight |v|), gradients over the largest, or over that of the values where theirs cancels.
    """
    form, limits = FORMS[name], torch.finfo(d.dtype)
    at, values, _ = roles(form.function)
    tol = ADVERSARIAL + LOGIT_EPS * MIXERS[form.row].largest_logit(exact, options) if want.numel() else ADVERSARIAL
    tol += 0.0 if d.dtype == torch.float32 else ROUNDINGS * limits.eps / 2
    signed = (
        set(options.get("feature", "").split("/")) <= ODD and form.row == "hydra"
    )  # the weights have both signs too
    loud = tuple(a.abs() if signed or i == values else a for i, a in enumerate(exact)) if values is not None else exact
    with torch.no_grad():
        scale = form.function(*loud, **options, backend="eager").abs()
    scale = torch.maximum(scale, want.abs())  # signed weights cancel in both
    _near("output", y, want, tol, scale.amax(-1, keepdim=True) if scale.numel() else scale, limits)
    sizes = [
        float(g.abs().max() * a.abs().max()) if g.numel() else 0.0 for g, a in zip(wanted, flat(exact), strict=True)
    ]
    against = (
        values if values is not None else at if form.averaged is None else form.averaged
    )  # gradients of logits cancel, this one does not
    product = form.product or ((len(exact) - 1, len(exact)) if isinstance(exact[-1], tuple) else ())
    for i, (ours, theirs) in enumerate(zip(grads, wanted, strict=True)):
        largest = float(theirs.abs().max()) if theirs.numel() else 0.0
        floor = 0.0 if i == against else sizes[against]
        if (
            i in product and flat(exact)[sum(product) - i].numel()
        ):  # a sum over the other factor, which cancels in the same way
            floor *= float(flat(exact)[sum(product) - i].abs().max())
        _near(f"gradient of tensor {i}", ours, theirs, tol, torch.tensor(max(largest, floor)), limits)


def _near(what: str, got: Tensor, want: Tensor, tol: float, scale: Tensor, limits: torch.finfo) -> None:
    assert got.shape == want.shape, f"{what}: of shape {tuple(got.shape)}, not {tuple(want.shape)}"
    fits = want.isfinite() & (want.abs() < limits.max / 2)
    assert bool(got.isfinite()[fits].all()), (
        f"{what}: {int((~got.isfinite())[fits].sum())} of {got.numel()} numbers are not finite"
    )
    off = torch.where(fits, (got.double() - want).abs(), 0.0)
    worst = off - tol * scale - limits.tiny  # what lies below the smallest normal number is rounded to multiples of it
    if off.numel() and float(worst.max()) > 0:
        where = tuple(int(i) for i in torch.unravel_index(worst.argmax(), worst.shape))
        least = float((off / scale.expand_as(off).clamp_min(limits.tiny)).max())
        raise AssertionError(
            f"{what}: off by {least:.2e}, {tol:.0e} allowed, "
            f"at {where}: {float(got[where]):.7g}, eager {float(want[where]):.7g}"
        )
