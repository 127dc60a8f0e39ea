"""The gate: a subject's result in its dtype is compared with float64 before its time is printed.

Operations run on the adversarial inputs of the contract, with its measure of error. Layers, including public
implementations, run on inputs that drive their keys to the same extremes, against their own float64 form; causal ones
are also checked for leaks from the future. Sizes are small and the backend is the one measured.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ... import functional
from ...errors import MixerError
from ...kernels.cpu import decode as step
from ...mixers import MIXERS, Mixer
from ...system.machine import torch_threads
from ...testing.inputs import adversarial_keys, noise
from ...testing.measure import SIZE, TOLERANCE, Measure, adversarial_cases, cast, largest
from ...testing.subject import roles
from ...types import Options
from .cases import ATTENTION, SDPA, BenchSubject, build, first_of, fused_attention, is_causal, op_args
from .flops import Setting
from .peers import PEERS

LENGTH, CELLS, WIDTH = 200, 72, 128
PEER_LENGTH = 256  # some take only multiples of their block
LAYER = {**TOLERANCE, torch.float32: 1e-4}
ROUNDING = 32
"""Layers round in their projections: their error may be LAYER of the largest output plus this many times the effect of
rounding the input once on the exact result.
"""
INPUTS = ("uniform", "late spike", "low with a late spike", "ramp up", "alternating")
"""The patterns that layers are given; their projections mix away the others."""
PROMISE = "accurate_on_adversarial_keys"


@dataclass(frozen=True)
class Verdict:
    """Whether the subject passed, its worst error with the tolerance and the case, the fused operators it ran, and what
    was not checked.
    """

    passed: bool
    error: float
    tolerance: float
    case: str
    path: str
    note: str = ""


class _Seen(TorchDispatchMode):
    """Record the fused operators among those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        if name.startswith("tokenmix::") or "scaled_dot_product" in name or "flex_attention" in name:
            self.names.add(name.replace("aten::_", "").replace("aten::", ""))
        return func(*args, **(kwargs or {}))

    @property
    def path(self) -> str:
        """The fused operators, or "eager"."""
        return ", ".join(sorted(n for n in self.names if "backward" not in n)) or "eager"


def gate(subject: BenchSubject, s: Setting) -> Verdict:
    """Judge a subject at a small size of the setting's kind; errors of any kind are raised as they are."""
    grid = s.grid and (
        *(2,) * (len(s.grid) - 2),
        max(2, CELLS // s.grid[-1]),
        s.grid[-1],
    )  # the width is kept: some layers are built for it
    length = torch.Size(grid).numel() if grid else PEER_LENGTH if subject.name in PEERS else LENGTH
    width = max(1, s.dim // s.heads)
    heads = max(1, min(s.heads, WIDTH // width))  # the width of a head is kept: kernels choose their path by it
    small = replace(
        s,
        T=length,
        grid=grid,
        batch=1,
        dim=s.dim if s.dim % s.heads else heads * width,
        heads=s.heads if s.dim % s.heads else heads,
    )
    with subject.scope():
        if subject.name in PEERS:
            return _layer(subject, small)
        first = _op(subject, small)
        if s.level == "op" or not first.passed:
            return first
        second = (_stream if s.level == "decode" and subject.name != SDPA else _layer)(subject, small)
    return second if not second.passed else replace(first, path=second.path)


def _op(subject: BenchSubject, s: Setting) -> Verdict:
    name = ATTENTION if subject.name == SDPA else subject.name
    try:
        mixer, form, args, options = op_args(replace(subject, name=name), replace(s, dtype="float32", level="op"))
    except MixerError:
        if MIXERS[name].facts.functional_form():
            raise
        return Verdict(True, 0.0, 0.0, "", "eager", "has no functional form, judged as a layer")
    waived = mixer.waived().get(PROMISE)
    if waived:
        return Verdict(True, 0.0, 0.0, "", _path(form, args, options), f"exactness is not checked: {waived}")
    run = (lambda q, k, v, **_: fused_attention(q, k, v, s.heads, options["causal"])) if subject.name == SDPA else form

    def call_eager(given: tuple, how: Options) -> Tensor:
        return form(*given, **{**how, "backend": "eager"})

    of, logit = roles(form), type(mixer).largest_logit
    measure = Measure(
        run, call_eager, of, logit, s.torch_dtype, s.device, backward=s.backward, signed=mixer.facts.signed
    )
    masked = subject.name != SDPA and "key_mask" in inspect.signature(form).parameters
    found = []
    for label, case, given in adversarial_cases(args, options, of, masked=masked):
        compared = measure.compare(case, given)
        found.append((max(part.error for part in compared.parts), compared.tolerance, label))
    worst = max(found, key=lambda f: f[0] / f[1])
    return Verdict(worst[0] <= worst[1], *worst, _path(run, cast(args, s.torch_dtype), options))


def _path(run: Callable[..., Tensor], args: tuple, options: Options) -> str:
    with torch.no_grad():
        return _path_of(lambda: run(*args, **options))


def _path_of(run: Callable[[], object], *, decoding: bool = False) -> str:
    """Return the fused operators that a call runs, or "eager".

    A call that decodes returns the kernels for a few tokens; these do not run while operators are watched.
    """
    if decoding:
        with _steps_seen() as steps:
            run()
        if steps:
            return ", ".join(sorted(steps))
    with _Seen() as seen:
        run()
    return seen.path


@contextmanager
def _steps_seen() -> Iterator[set[str]]:
    """Record the kernels for a few tokens, which are not operators."""
    seen: set[str] = set()

    def note_kernel(kernel: Callable[..., object], name: str) -> Callable[..., object]:
        def call(*args: object, **given: object) -> object:
            seen.add(f"step_{name} in C")
            return kernel(*args, **given)

        return call

    with ExitStack() as stack:
        for name in {cls.facts.kernels.step for cls in MIXERS.values() if cls.facts.kernels.step}:
            stack.enter_context(mock.patch.object(step, name, note_kernel(getattr(step, name), name)))
        yield seen


def _layer(subject: BenchSubject, s: Setting) -> Verdict:
    """Compare a whole layer on adversarial inputs with its own float64 form, and check it for leaks."""
    layer = build(subject, s).eval()
    place = {"grid": s.grid} if s.grid and isinstance(layer, Mixer) and layer.facts.grid else {}

    def run(module: Any, x: Tensor) -> Tensor:
        torch.manual_seed(5)  # some draw random numbers in each call
        return first_of(module(x, **place))

    unlike = subject.name in PEERS and PEERS[subject.name].unlike
    return _compare_with_float64(
        subject,
        s,
        layer,
        run,
        exact=None if unlike else run,
        note=f"{unlike}: checked only for finite outputs and leaks" if unlike else "",
    )


def _stream(subject: BenchSubject, s: Setting) -> Verdict:
    """Compare decoding, a chunk and then the last tokens one by one, with the float64 form on the whole sequence."""
    layer = build(subject, s, s.T).eval()
    if not layer.capabilities.streaming:
        return Verdict(True, 0.0, 0.0, "", "eager")

    def run(module: Any, x: Tensor) -> Tensor:
        state = module.init_state(1, device=x.device, dtype=x.dtype)
        pieces = [x[:, : s.T - 4], *x[:, s.T - 4 :].split(1, 1)]
        out = []
        for piece in pieces:
            y, state = module.extend(piece, state)
            out.append(y)
        return torch.cat(out, 1)

    return _compare_with_float64(subject, s, layer, run, exact=lambda module, x: module(x))


@torch.no_grad()
def _compare_with_float64(
    subject: BenchSubject,
    s: Setting,
    layer: nn.Module,
    run: Callable[..., Tensor],
    exact: Callable[..., Tensor] | None,
    note: str = "",
) -> Verdict:
    double, tol, leak = copy.deepcopy(layer).double(), LAYER[s.torch_dtype], TOLERANCE[s.torch_dtype]
    found, path = [], ""
    inputs = adversarial_keys((1, s.T, s.dim), size=SIZE)
    for name in INPUTS:
        x = inputs[name].to(s.device, s.torch_dtype)
        path = path or _path_of(partial(run, layer, x), decoding=s.level == "decode")
        got = run(layer, x).double()  # outside of the watched call, in which a few tokens take the eager form
        if exact is None:
            found.append((0.0 if bool(got.isfinite().all()) else float("inf"), tol, f"input {name}"))
            continue
        with functional.use_backend("eager"), torch_threads(1):
            want, shaken = (
                exact(double, a)
                for a in (
                    x.double(),
                    x.double() * (1 + torch.finfo(s.torch_dtype).eps * noise(*x.shape, seed=7).to(s.device)),
                )
            )
        scale = max(float(want.abs().max()), 1e-38)
        found.append((largest(got - want) / scale, tol + ROUNDING * largest(shaken - want) / scale, f"input {name}"))
    if is_causal(subject, s):
        found += [
            (
                _leak(lambda x: run(layer, x), s, size),
                leak,
                f"the future, replaced by numbers of {size:g}, changes the past",
            )
            for size in (1.0, 100.0)
        ]
    worst = max(found, key=lambda f: f[0] / f[1])
    return Verdict(worst[0] <= worst[1], *worst, path, note)


def _leak(run: Callable[[Tensor], Tensor], s: Setting, size: float) -> float:
    x = noise(1, s.T, s.dim, seed=3)
    other, past = x.clone(), 3 * s.T // 5
    other[:, past:] = size * noise(1, s.T - past, s.dim, seed=4)
    a, b = (run(t.to(s.device, s.torch_dtype))[:, :past].double() for t in (x, other))
    return largest(a - b) / max(float(a.abs().max()), 1e-38)
