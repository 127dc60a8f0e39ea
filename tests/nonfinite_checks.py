"""Put NaN and infinity into what the kernels read: calls with one such number, and what must come of them.

Which outputs may attend a number is asked of the float64 form: those that change when it does. They are not finite, or
what mathematics says; all others, and the gradients of these, are what they are with an ordinary number in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenmix import build_mixer, functional

B, T, D, HEADS = 2, 70, 6, 2
PLACES = (0, 33, T - 1)
NAN, INF = float("nan"), float("inf")
TOL = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
LIMIT = 1e30  # what infinity is the limit of


class Form(NamedTuple):
    """Describe a functional form with a kernel.

    Its options, the shapes of its arguments after q, k, v, and which of their axes runs over the keys. ``exact``: a key
    of -inf weighs 0. ``limits``: an infinite key may be what its limit is.
    """

    function: Callable[..., Tensor]
    options: dict[str, Any]
    more: tuple[tuple[int, ...], ...] = ()
    causal: tuple[bool, ...] = (False, True)
    key: int = D
    exact: bool = True
    limits: bool = False


def factored(q, k, v, u1, u2, **options):
    return functional.aft_full(q, k, v, (u1, u2), **options)


def external(x, memory_k, memory_v, **options):
    return functional.external(x, memory_k, memory_v, **options)


GRID = {"grid": (7, 10), "prefix": 0}
FORMS: dict[str, Form] = {
    "aft_simple": Form(functional.aft_simple, {}),
    "aft_simple ungated": Form(functional.aft_simple, {"gate": None}),
    "aft_forget": Form(functional.aft_forget, {}, ((B, T, D),), causal=(True,)),
    "aft_forget norm": Form(functional.aft_forget, {"heads": 3}, ((B, T, D),), causal=(True,)),
    "aft_pairs": Form(functional.aft_pairs, {}, ((B, T, HEADS, 3),) * 3, causal=(True,)),
    "aft_full": Form(functional.aft_full, {}, ((T, T),)),
    "aft_full batched": Form(functional.aft_full, {}, ((B, T, T),)),
    "aft_full factors": Form(factored, {}, ((T, 3), (T, 3))),
    "aft_local": Form(functional.aft_local, {"window": 5}, ((T, T),)),
    "aft_conv": Form(functional.aft_conv, {}, ((HEADS, 5),), key=HEADS),
    "aft_conv 2-D": Form(functional.aft_conv, GRID, ((HEADS, 3, 3),), causal=(False,), key=HEADS),
    "hydra": Form(functional.hydra, {}, exact=False, limits=True),
    "hydra mean": Form(functional.hydra, {"feature": "mean"}, exact=False, limits=True),
    "hydra softmax": Form(functional.hydra, {"feature": "sigmoid/softmax"}),
    "linear": Form(functional.linear_attention, {"heads": HEADS}),
    "linear exp": Form(functional.linear_attention, {"heads": HEADS, "feature": "exp"}),
}


def drawn(form: Form) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = [(B, T, D), (B, T, form.key), (B, T, D), *form.more]
    return [torch.randn(s, generator=draw, dtype=torch.float64).bfloat16().double() for s in shapes]


def spot(form: Form, name: str, which: int, place: int) -> tuple[int, ...]:
    """Return the entry of an argument that is poisoned.

    It is an entry of token ``place`` in the first row of the batch, or a weight of that token.
    """
    if which < 3:
        return (0, place, 1)
    shape = form.more[which - 3]
    if shape[-1] == T:
        return (*[0] * (len(shape) - 2), T - 1 - (T - 1 - place) // 2, place)  # of a row after it
    if shape == (T, 3):
        return (place, 1)
    return (1, *[n // 2 if place == 33 else 0 if place == 0 else n - 1 for n in shape[1:]])


def put(args: list[Tensor], which: int, at: tuple[int, ...], value: float) -> list[Tensor]:
    changed = [a.clone() for a in args]
    changed[which][at] = value
    return changed


def run(
    form: Form, args: list[Tensor], dtype: torch.dtype, backend: str, g: Tensor | None, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Output and, with g, gradients of every argument."""
    leaves = [a.to(dtype).requires_grad_(g is not None) for a in args]
    y = form.function(*leaves, **form.options, **options, backend=backend)
    grads = [] if g is None else torch.autograd.grad(y, leaves, g.to(y.dtype), allow_unused=True)
    return y.detach().double(), [
        torch.zeros_like(a).double() if d is None else d.double() for a, d in zip(leaves, grads, strict=False)
    ]


class Asked(NamedTuple):
    """Hold a call with a finite number in one place.

    Its outputs, which of them depend on that number, and the gradients of those that do not.
    """

    want: Tensor
    touched: Tensor
    open: Tensor  # neither: a row with one key or none says nothing of its weights
    g: Tensor
    grads: list[Tensor]


@functools.cache
def asked(name: str, causal: bool, which: int, place: int, masked: bool) -> Asked:
    form = FORMS[name]
    args, at, options = drawn(form), spot(form, name, which, place), called(name, causal, place, masked)
    ys = [run(form, put(args, which, at, value), torch.float64, "eager", None, **options)[0] for value in (0.25, 1.25)]
    touched = (ys[1] - ys[0]).abs() > 1e-9
    if which == 1:
        # The only key of a row is attended whatever it is: what depends on the values of this token, in the features
        # of the key.
        other = args[2].clone()
        other[0, place] += 1.0
        values = (
            run(form, put([*args[:2], other, *args[3:]], which, at, 0.25), torch.float64, "eager", None, **options)[0]
            - ys[0]
        ).abs() > 1e-9
        touched = values & touched.any(1, keepdim=True)
    seen = options["key_mask"].cumsum(1) if causal else options["key_mask"].sum(1, keepdim=True).expand(-1, T)
    few = (seen <= 1)[..., None] & ~touched if which not in (1, 2) else torch.zeros_like(touched)
    if which > 2 and place == 0 and form.more[which - 3][:2] == (B, T):  # the first token's decay: there is nothing yet
        wide = form.more[which - 3] == (B, T, D)
        together = D // (form.options.get("heads", D) if wide else HEADS)
        head = at[2] // together if wide else at[2]
        few[at[0], :, head * together : (head + 1) * together] = True
        few &= ~touched
    g = torch.randn(touched.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).bfloat16().double()
    grads = run(form, put(args, which, at, 0.25), torch.float64, "eager", g.masked_fill(touched | few, 0.0), **options)[
        1
    ]
    return Asked(ys[0], touched, few, g, grads)


def called(name: str, causal: bool, place: int, masked: bool) -> dict[str, Any]:
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[:, 5] = mask[1, 60:] = False
    mask[:, place] = not masked
    return {**({"causal": True} if causal else {}), "key_mask": mask}


def near(got: Tensor, want: Tensor, tol: float) -> bool:
    return bool(((got - want).abs() <= tol * max(1.0, float(want.abs().max()) if want.numel() else 0.0)).all())


def check(
    name: str,
    causal: bool,
    which: int,
    place: int,
    value: float,
    masked: bool,
    dtype: torch.dtype = torch.float32,
    backend: str = "cpu",
) -> None:
    """One poisoned call: outputs, gradients of the rows that may not attend the poison, and those of all rows."""
    form, tol = FORMS[name], TOL[dtype]
    told = f"{name}, causal={causal}, argument {which}, place {place}, {value}, masked={masked}"
    expected, at, options = (
        asked(name, causal, which, place, masked),
        spot(form, name, which, place),
        called(name, causal, place, masked),
    )
    args, touched = drawn(form), expected.touched
    poisoned = put(args, which, at, value)
    y, grads = run(form, poisoned, dtype, backend, expected.g, **options)
    rest = ~touched & ~expected.open
    assert near(y[rest], expected.want[rest], tol), f"{told}: an output that may not attend it is another"
    strict = value != value or which == 2 or (which == 1 and value == INF and not form.limits)
    if strict:
        assert not y[touched].isfinite().any(), (
            f"{told}: {int(y[touched].isfinite().sum())} of {int(touched.sum())} outputs that attend it are finite"
        )
    else:
        limit = run(
            form, put(args, which, at, max(-LIMIT, min(LIMIT, value))), torch.float64, "eager", None, **options
        )[0]
        wrong = touched & y.isfinite() & ~((y - limit).abs() <= tol * limit.abs().clamp_min(1.0))
        if (
            which == 1 and value == -INF and form.exact
        ):  # it weighs exactly 0: a row that may attend no other key has nothing to attend, and is 0
            alone = (
                options["key_mask"].cumsum(1) if causal else options["key_mask"].sum(1, keepdim=True).expand(-1, T)
            ) == 1
            nothing = alone[..., None] & (y == 0)
            if "heads" in form.options:  # a norm ties the features of a head together
                nothing = nothing.unflatten(-1, (form.options["heads"], -1)).any(-1, keepdim=True)
                nothing = nothing.expand(*y.shape[:2], -1, y.shape[2] // form.options["heads"]).flatten(2)
            wrong &= ~nothing
        assert not wrong.any(), f"{told}: plausible and wrong"
        if which == 1 and form.exact:
            assert y.isfinite().all(), f"{told}: a key of -inf weighs 0"
    if strict and touched.any():
        assert not all(g.isfinite().all() for g in grads), f"{told}: the gradients are finite"
    mask = options["key_mask"]
    for i in (1, 2):
        assert grads[i][~mask].eq(0).all(), f"{told}: a masked token has a gradient"
        assert which > 2 or grads[i][1].isfinite().all(), f"{told}: gradients of another row of the batch"
    if y[touched].isfinite().all() and touched.any():
        return  # exact: the rows that attend it say nothing more
    if which == 3 and form.function is factored and bool(expected.open[:, place].all()):
        # The factor of a query with one key: its output does not depend on it, so that nothing tells that it is
        # infinite.
        return
    apart = run(form, poisoned, dtype, backend, expected.g.masked_fill(touched | expected.open, 0.0), **options)[1]
    for i, (got, want) in enumerate(zip(apart, expected.grads, strict=True)):
        here = torch.zeros_like(want, dtype=torch.bool)
        here[at if which > 2 and i == which else at[:2] if i < 3 and which < 3 else ()] = i == which or (
            i < 3 and which < 3
        )
        off = (got - want).masked_fill(here, 0.0)
        assert near(off, torch.zeros(()), tol * max(1.0, float(want.abs().max()))), (
            f"{told}: argument {i} has another gradient from rows that may not attend it"
        )


def poisons(form: Form, *, all_of_them: bool) -> Iterator[tuple[int, int, float, bool]]:
    """Argument, place, value, whether the token is masked."""
    for which in range(3 + len(form.more)):
        if which == 0 and form.options.get("gate", "") is None:
            continue
        for place in PLACES:
            for value in (NAN, INF, -INF):
                for masked in (False, True):
                    some = (
                        place == 33
                        and not masked
                        or value != value
                        and place + masked < T
                        or which > 2
                        and masked
                        and place == 0
                        or which == 1
                        and value == INF
                        and place == T - 1
                        and not masked
                    )
                    if all_of_them or some:
                        yield which, place, value, masked


FLAG = 7.0  # in the last channel of the token that a projection poisons
CHUNKS = (1, 5, 1, 1, 8, 1, 9, 1, 1, 8, *[1] * 8, 8, 8, 2)


def stream(name: str, options: dict[str, Any], projection: str, value: float) -> None:
    """Feed token after token, of which one has a key, value or query that is not finite in one feature.

    Its row is not finite; with keys and values those after it are not either.
    """
    torch.manual_seed(0)
    mixer, x = build_mixer(name, 16, causal=True, **options).requires_grad_(False), torch.randn(B, sum(CHUNKS), 16)
    at = sum(CHUNKS) // 2
    x[0, at, -1] = FLAG

    def streamed() -> Tensor:
        outputs, state, done = [], mixer.init_state(B), 0
        for n in CHUNKS:
            y, state = mixer.extend(x[:, done : done + n], state)
            outputs.append(y)
            done += n
        return torch.cat(outputs, 1)

    def poison(module: torch.nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return torch.where((inputs[0][..., -1:] == FLAG) & (torch.arange(y.shape[-1]) == 1), value, y)

    want = streamed()
    with mixer.get_submodule(projection).register_forward_hook(poison):
        y = streamed()
    rows = torch.zeros(y.shape[:2], dtype=torch.bool)
    rows[0, at : at + 1 if projection == "q_proj" else None] = True
    told = f"{name}, {value} in {projection}"
    assert near(y[~rows], want[~rows], 1e-6), f"{told}: another row is another"
    assert not y[rows].isfinite().any(), (
        f"{told}: {int(y[rows].isfinite().any(-1).sum())} of {int(rows.sum())} rows that attend it are finite"
    )


def check_stream(row: tuple[str, dict[str, Any]]) -> None:
    for projection, value in (("k_proj", NAN), ("k_proj", INF), ("v_proj", NAN), ("q_proj", NAN)):
        stream(*row, projection, value)
