"""Right before fast: what a subject computes in the dtype at hand is compared with float64 before its time is printed.

Operations run on the adversarial inputs of the contract, with its measure of error; layers, which also public implementations are, run on inputs that drive
their keys there, against their own float64 form, and when causal are tried for leaks from the future. Sizes are small and the backend is the one measured.
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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .. import functional
from ..errors import MixerError
from ..kernels.cpu import decode as step
from ..mixers import MIXERS
from ..testing import adversarial_keys
from ..testing.inputs import big_bias, key_masks, noise
from ..testing.subject import roles
from ..testing.tolerances import ADVERSARIAL, BY_DTYPE, LOGIT_EPS
from .cases import ATTENTION, SDPA, Subject, build, first_of, fused_attention, is_causal, op_args
from .flops import Setting, leaves_of
from .peers import PEERS

LENGTH, CELLS, SIZE, WIDTH = 200, 72, 100.0, 128
PEER_LENGTH = 256  # some take multiples of their block only
TOLERANCE = {"float32": ADVERSARIAL, "bfloat16": BY_DTYPE[torch.bfloat16], "float16": BY_DTYPE[torch.float16]}
"""Of the output over sum(weight |v|), of gradients over their largest; half precision rounds its output."""
LAYER = {**TOLERANCE, "float32": 1e-4}
ROUNDING = 32
"""A layer may be off by LAYER of its largest output, and by this many times what rounding its input once does to the exact result: its projections round."""
INPUTS = ("uniform", "late spike", "low with a late spike", "ramp up", "alternating")
"""The patterns that layers are given; their projections mix the others out of them."""
PROMISE = "accurate_on_adversarial_keys"


@dataclass(frozen=True)
class Verdict:
    """Whether the subject passed, its worst error with the tolerance it had there and the case, what fused operators it ran, and what was not asked."""

    passed: bool
    error: float
    tolerance: float
    case: str
    path: str
    note: str = ""


class _Seen(TorchDispatchMode):
    """Notes the fused operators among those that run."""

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


def gate(subject: Subject, s: Setting) -> Verdict:
    """Judge a subject at a small size of the setting's kind; errors of any kind are raised as they come."""
    grid = s.grid and (*(2,) * (len(s.grid) - 2), max(2, CELLS // s.grid[-1]), s.grid[-1])  # the width is kept, which some layers are built for
    length = torch.Size(grid).numel() if grid else PEER_LENGTH if subject.name in PEERS else LENGTH
    width = max(1, s.dim // s.heads)
    heads = max(1, min(s.heads, WIDTH // width))  # the width of a head is kept, as kernels choose their path by it
    small = replace(s, T=length, grid=grid, batch=1, dim=s.dim if s.dim % s.heads else heads * width, heads=s.heads if s.dim % s.heads else heads)
    with subject.scope():
        if subject.name in PEERS:
            return _layer(subject, small)
        first = _op(subject, small)
        if s.level == "op" or not first.passed:
            return first
        second = (_stream if s.level == "decode" and subject.name != SDPA else _layer)(subject, small)
    return second if not second.passed else replace(first, path=second.path)


def _op(subject: Subject, s: Setting) -> Verdict:
    name = ATTENTION if subject.name == SDPA else subject.name
    try:
        mixer, form, args, options = op_args(replace(subject, name=name), replace(s, dtype="float32", level="op"))
    except MixerError:
        if MIXERS[name].functional_form():
            raise
        return Verdict(True, 0.0, 0.0, "", "eager", "has no functional form, judged as a layer")
    waived = mixer.waived().get(PROMISE)
    if waived:
        return Verdict(True, 0.0, 0.0, "", _path(form, args, options), f"not asked for exactness: {waived}")
    run = (lambda q, k, v, **_: fused_attention(q, k, v, s.heads, options["causal"])) if subject.name == SDPA else form

    def tolerance(exact: tuple, given: dict[str, Any]) -> float:
        return TOLERANCE[s.dtype] + LOGIT_EPS * type(mixer).largest_logit(exact, given)

    trial = _Trial(run, form, s, tolerance, signed=mixer.signed)
    found = [trial.judge(case, given, label) for label, case, given in _cases(form, args, options, masks=subject.name != SDPA)]
    worst = max(found, key=lambda f: f[0] / f[1])
    return Verdict(worst[0] <= worst[1], *worst, _path(run, _cast(args, s.torch_dtype), options))


def _path(run: Callable[..., Tensor], args: tuple, options: dict[str, Any]) -> str:
    with torch.no_grad():
        return _path_of(lambda: run(*args, **options))


def _path_of(run: Callable[[], Any], *, decoding: bool = False) -> str:
    """The fused operators that a call runs, or "eager"; of one that decodes the kernels for a few tokens, which rest while operators are watched."""
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
    """Notes the kernels for a few tokens, which are no operators."""
    seen: set[str] = set()

    def noted(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            seen.add(f"step_{name} in C")
            return kernel(*args, **given)

        return call

    with ExitStack() as stack:
        for name in {cls.kernels.step for cls in MIXERS.values() if cls.kernels.step}:
            stack.enter_context(mock.patch.object(step, name, noted(getattr(step, name), name)))
        yield seen


def _cases(form: Callable[..., Tensor], args: tuple, options: dict[str, Any], *, masks: bool) -> Iterator[tuple[str, tuple, dict[str, Any]]]:
    """The contract's adversarial arguments: every pattern of keys, log-weights up to 60, a mask."""
    at, _, biases = roles(form)
    shape = tuple(args[at].shape)
    for i, (name, keys) in enumerate(adversarial_keys(shape, size=SIZE).items()):
        case = _with(args, at, keys)
        if biases and i % 2 == 0:
            for b in biases:
                case = _with(case, b, big_bias((case[b],), size=60.0)[0])
        yield f"keys {name}{', |w| to 60' if biases and i % 2 == 0 else ''}", case, options
    if masks and "key_mask" in inspect.signature(form).parameters:
        hidden = key_masks(shape[1])["mixed"][:1].to(args[at].device)
        yield "keys uniform with key_mask", _with(args, at, adversarial_keys(shape, size=SIZE)["uniform"]), {**options, "key_mask": hidden}


def _with(args: tuple, at: int, value: Any) -> tuple:
    return (*args[:at], value, *args[at + 1 :])


def _cast(value: Any, dtype: torch.dtype, device: str | None = None) -> Any:
    """Rounded to ``dtype``, tuples included; ready to be differentiated."""
    if isinstance(value, tuple):
        return tuple(_cast(v, dtype, device) for v in value)
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device, dtype).clone().requires_grad_() if value.is_floating_point() else value.to(device)


@dataclass
class _Trial:
    """One functional form in the dtype at hand against its eager form in float64, output and, where they are timed, gradients."""

    run: Callable[..., Tensor]
    form: Callable[..., Tensor]
    s: Setting
    tolerance: Callable[[tuple, dict[str, Any]], float]
    signed: bool = False

    def judge(self, case: tuple, options: dict[str, Any], label: str) -> tuple[float, float, str]:
        """The largest error, the tolerance and the case."""
        args = _cast(case, self.s.torch_dtype, self.s.device)
        exact = _cast(args, torch.float64)
        got, grads = _derive(lambda a: self.run(*a, **options), args, self.s.backward)
        eager = {**options, "backend": "eager"}
        _, values, _ = roles(self.form)
        with one_thread():
            want, wanted = _derive(lambda a: self.form(*a, **eager), exact, self.s.backward)
            with torch.no_grad():
                loud = exact if values is None else _with(exact, values, exact[values].abs())
                unit = self.form(*loud, **eager).abs().amax(-1, keepdim=True)
        unit = unit.amax() if self.signed else unit
        tiny = torch.finfo(self.s.torch_dtype).tiny  # below it the dtype itself rounds
        errors = [_largest((got.double() - want) / torch.where(unit > tiny, unit, 1.0))]
        sizes = [float(g.abs().max() * a.detach().abs().max()) for g, a in zip(wanted, leaves_of(exact), strict=False) if g.numel()]
        floor = max(sizes, default=0.0) if values is None else float(wanted[values].abs().max() * exact[values].detach().abs().max()) if wanted else 0.0
        for ours, theirs in zip(grads, wanted, strict=True):
            if theirs.numel():  # gradients of logits cancel, and are rounded against that of the values
                errors.append(_largest(ours.double() - theirs) / max(float(theirs.abs().max()), floor, tiny))
        return max(errors), self.tolerance(exact, options), label


@contextmanager
def one_thread() -> Iterator[None]:
    """For many small operations, whose threads only wait for each other; what is judged keeps its threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _derive(run: Callable[[tuple], Tensor], args: tuple, backward: bool) -> tuple[Tensor, list[Tensor]]:
    if not backward:
        with torch.no_grad():
            return run(args), []
    y, leaves = run(args), leaves_of(args)
    weight = noise(*y.shape, seed=9).to(y)
    grads = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    return y.detach(), [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, grads, strict=True)]


def _largest(error: Tensor) -> float:
    """The largest magnitude; infinite where anything is not finite."""
    return float(error.abs().max()) if error.numel() and bool(error.isfinite().all()) else float("inf") if error.numel() else 0.0


def _layer(subject: Subject, s: Setting) -> Verdict:
    """A whole layer on adversarial inputs against its own float64 form, and for leaks."""
    layer = build(subject, s).eval()
    place = {"grid": s.grid} if s.grid and getattr(layer, "supports_grid", False) else {}

    def run(module: Any, x: Tensor) -> Tensor:
        torch.manual_seed(5)  # some draw in each call
        return first_of(module(x, **place))

    unlike = subject.name in PEERS and PEERS[subject.name].unlike
    return _against_itself(subject, s, layer, run, exact=None if unlike else run, note=f"{unlike}: judged on being finite and on leaks" if unlike else "")


def _stream(subject: Subject, s: Setting) -> Verdict:
    """Decoding: the last tokens one by one after a chunk, against the float64 form on the whole sequence."""
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

    return _against_itself(subject, s, layer, run, exact=lambda module, x: module(x))


@torch.no_grad()
def _against_itself(subject: Subject, s: Setting, layer: Any, run: Callable[..., Tensor], exact: Callable[..., Tensor] | None, note: str = "") -> Verdict:
    double, tol, leak = copy.deepcopy(layer).double(), LAYER[s.dtype], TOLERANCE[s.dtype]
    found, path = [], ""
    inputs = adversarial_keys((1, s.T, s.dim), size=SIZE)
    for name in INPUTS:
        x = inputs[name].to(s.device, s.torch_dtype)
        path = path or _path_of(partial(run, layer, x), decoding=s.level == "decode")
        got = run(layer, x).double()  # not while operators are watched: a few tokens would then take the eager form
        if exact is None:
            found.append((0.0 if bool(got.isfinite().all()) else float("inf"), tol, f"input {name}"))
            continue
        with functional.use_backend("eager"), one_thread():
            want, shaken = (exact(double, a) for a in (x.double(), x.double() * (1 + torch.finfo(s.torch_dtype).eps * noise(*x.shape, seed=7).to(s.device))))
        scale = max(float(want.abs().max()), 1e-38)
        found.append((_largest(got - want) / scale, tol + ROUNDING * _largest(shaken - want) / scale, f"input {name}"))
    if is_causal(subject, s):
        found += [(_leak(lambda x: run(layer, x), s, size), leak, f"the future, replaced by numbers of {size:g}, changes the past") for size in (1.0, 100.0)]
    worst = max(found, key=lambda f: f[0] / f[1])
    return Verdict(worst[0] <= worst[1], *worst, path, note)


def _leak(run: Callable[[Tensor], Tensor], s: Setting, size: float) -> float:
    x = noise(1, s.T, s.dim, seed=3)
    other, past = x.clone(), 3 * s.T // 5
    other[:, past:] = size * noise(1, s.T - past, s.dim, seed=4)
    a, b = (run(t.to(s.device, s.torch_dtype))[:, :past].double() for t in (x, other))
    return _largest(a - b) / max(float(a.abs().max()), 1e-38)
