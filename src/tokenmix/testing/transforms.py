"""Promises on torch's transformations of a module: compile, export, copies, dtypes, meta builds, autocast."""

from __future__ import annotations

import copy
import importlib.util
import io
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .. import functional
from ..export.inputs import Call, Step, silence_exporters
from ..export.onnx_model import onnx_session, run_onnx
from ..mixers import Mixer
from ..types import Options
from . import inputs
from .batching import _output_of
from .device import leave_device
from .report import NotApplicable, fail, finite, same
from .subject import Subject, gradients, is_mixer
from .tolerances import BY_DTYPE


def compiles(s: Subject) -> None:
    """``torch.compile(fullgraph=True)`` gives the same output and gradients, with and without a mask."""
    forms: list[Options] = [{}] + ([{"key_mask": inputs.key_masks(s.length)["mixed"]}] if is_mixer(s.cls) else [])
    for given in forms:
        torch._dynamo.reset()
        mixer = s.build(dtype=torch.float32)
        fast = torch.compile(mixer, backend=s.compile_backend, fullgraph=True)
        x = s.x(dtype=torch.float32).requires_grad_()
        live = given.get("key_mask", torch.ones(2, s.length, dtype=torch.bool))
        weight = inputs.noise(2, s.length, s.dim, seed=5, dtype=torch.float32) * live[..., None]
        leaves = {"x": x, **{n: p for n, p in mixer.named_parameters() if p.requires_grad}}
        want = _output_of(s.call(mixer, x, **given))
        with leave_device():
            got = _output_of(s.call(fast, x, **given))
        shown = {"seed": s.seed, "backend": s.compile_backend, **given}
        same(got, want, "the compiled output differs", live=live, start=0, **shown)
        ours, theirs = (gradients((y * weight).sum(), leaves) for y in (got, want))
        scale = max(float(g.abs().max()) for g in theirs.values())
        for name in leaves:
            same(
                ours[name],
                theirs[name],
                f"the compiled gradient of {name} differs",
                scale=scale,
                of="the largest gradient",
                **shown,
            )
    torch._dynamo.reset()


def exports(s: Subject) -> None:
    """A program of ``torch.export`` gives the same numbers on other inputs after saving and loading, a streaming step
    too.
    """
    mixer = s.build(dtype=torch.float32)
    if not mixer.capabilities.export:
        raise NotApplicable("declares no export")
    masks = inputs.key_masks(s.length)
    program = _save_and_load(Call(mixer, **s.place()), (s.x(dtype=torch.float32), masks["mixed"]))
    x, mask = s.x(stream=2, dtype=torch.float32), masks["left"]
    same(
        program.module()(x, mask),
        s.call(mixer, x, key_mask=mask),
        "the exported program differs",
        live=mask,
        start=0,
        seed=s.seed,
        key_mask=mask,
    )
    if mixer.capabilities.streaming:
        _, state = mixer.extend(x[:, :2], mixer.init_state(2))
        step = _save_and_load(Step(mixer), (x[:, 2:3], state)).module()
        got, after = step(x[:, 3:4], state)
        same(got, mixer.extend(x[:, 3:4], state)[0], "the exported streaming step differs", seed=s.seed)
        with functional.use_backend("eager"):  # what is exported; kernels round otherwise what a float64 state adds up
            _, expected = mixer.extend(x[:, 3:4], state)
        for a, b in zip(pytree.tree_leaves(after), pytree.tree_leaves(expected), strict=True):
            same(a, b, "the exported streaming step gives another state", seed=s.seed)


def _save_and_load(module: nn.Module, args: tuple) -> torch.export.ExportedProgram:
    buffer = io.BytesIO()
    with silence_exporters(), torch.serialization.safe_globals([type(a) for a in args if not isinstance(a, Tensor)]):
        torch.export.save(torch.export.export(module, args), buffer)
        buffer.seek(0)
        return torch.export.load(buffer)


def exports_to_onnx(s: Subject) -> None:
    """The ONNX form, run by ONNX Runtime, gives the same numbers on other inputs."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise NotApplicable(f"{package} is not installed")
    mixer = s.build(dtype=torch.float32)
    if not mixer.capabilities.export:
        raise NotApplicable("declares no export")
    masks = inputs.key_masks(s.length)
    x, mask = s.x(stream=2, dtype=torch.float32), masks["left"]
    with silence_exporters():
        program: Any = torch.onnx.export(
            Call(mixer, **s.place()), (s.x(dtype=torch.float32), masks["mixed"]), dynamo=True, verbose=False
        )
    got = run_onnx(onnx_session(program.model_proto.SerializeToString()), (x, mask))[0]
    want = s.call(mixer, x, key_mask=mask)
    same(got, want, "ONNX differs", live=mask, start=0, seed=s.seed, key_mask=mask)


def copies(s: Subject) -> None:
    """A deepcopy is equal and shares nothing, no two parameters share memory, and every tensor is a parameter or a
    buffer.
    """
    mixer, x = s.build(), s.x()
    want = _output_of(s.call(mixer, x)).detach().clone()
    twin = copy.deepcopy(mixer)
    same(_output_of(s.call(twin, x)), want, "a deepcopy differs", seed=s.seed)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    same(_output_of(s.call(mixer, x)), want, "changing a deepcopy changes the original", seed=s.seed)
    places: dict[int, str] = {}
    for name, p in s.raw().named_parameters():  # as built: a change of dtype would separate them
        if p.numel() and p.data_ptr() in places:
            fail(f"the parameters {places[p.data_ptr()]} and {name} share memory: an optimiser would update it twice")
        places[p.data_ptr()] = name
    for path, module in mixer.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                fail(f"{path + '.' if path else ''}{name} is a plain tensor: not in state_dict, not moved by .to()")


def state_dict_round_trip(s: Subject) -> None:
    """The state_dict holds everything that determines the output."""
    mixer, x = s.build(), s.x()
    other = s.build(seed=s.seed + 100)
    buffer = io.BytesIO()
    torch.save(mixer.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True), strict=True)
    same(
        _output_of(s.call(other, x)),
        _output_of(s.call(mixer, x)),
        "another mixer with this state_dict loaded differs",
        seed=s.seed,
    )


def changes_dtype(s: Subject) -> None:
    """``.to(dtype)`` converts everything, and the output has that dtype and stays near the float64 one."""
    exact, x = s.build(), 0.5 * s.x()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        mixer = s.build().to(dtype)
        with torch.no_grad():
            for p, q in zip(exact.parameters(), mixer.parameters(), strict=True):
                p.copy_(q.double())
        small = x.to(dtype)
        y = _output_of(s.call(mixer, small))
        if y.dtype != dtype:
            fail(f"a {dtype} mixer gives {y.dtype}", seed=s.seed)
        finite(y, f"output in {dtype}", seed=s.seed, x=small)
        same(
            y,
            _output_of(s.call(exact, small.double())),
            f"{dtype} is too far from float64",
            start=0,
            seed=s.seed,
            x=small,
        )


def builds_on_meta(s: Subject) -> None:
    """A meta build, to_empty and reset_parameters under a seed equal a direct build under that seed.

    Meta tensors pass through the meta build.
    """
    torch.manual_seed(s.seed + 1)
    direct = s.raw()
    with torch.device("meta"):
        late = s.raw()
    device = _output_of(s.call(late, s.x(dtype=torch.float32).to("meta"))).device.type
    if device != "meta":
        fail(f"a mixer on the meta device gives a tensor on {device!r}", seed=s.seed)
    late = late.to_empty(device=torch.get_default_device())
    with torch.no_grad():
        for t in (*late.parameters(), *late.buffers()):
            t.fill_(float("nan") if t.is_floating_point() else 1)
    torch.manual_seed(s.seed + 1)
    late.reset_parameters()
    for (name, want), got in zip(
        (*direct.named_parameters(), *direct.named_buffers()), (*late.parameters(), *late.buffers()), strict=True
    ):
        if not torch.equal(got, want):
            fail(
                f"{name} after a meta build and reset_parameters is not that of a direct build",
                got=got,
                expected=want,
                seed=s.seed + 1,
            )


def runs_under_autocast(s: Subject) -> None:
    """Under autocast outputs are near the float32 ones, gradients are finite, and mixing itself stays exact.

    Checked to bfloat16 and to float16; only the projections and the returned output are rounded.
    """
    mixer = s.build(dtype=torch.float32)
    x = (0.5 * s.x(dtype=torch.float32)).requires_grad_()
    want = _output_of(s.call(mixer, x))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(torch.get_default_device().type, dtype=dtype):
            got = _output_of(s.call(mixer, x))
        same(got, want, f"autocast to {dtype} is too far from float32", tol=BY_DTYPE[dtype], start=0, seed=s.seed, x=x)
        for name, grad in gradients(got.float().sum(), {"x": x, **dict(mixer.named_parameters())}).items():
            finite(grad, f"gradient of {name} under autocast to {dtype}", seed=s.seed, x=x)
        if s.functional is not None and hasattr(mixer, "functional_args"):
            _mixes_exactly(s, mixer, 4 * x.detach(), dtype)


def _mixes_exactly(s: Subject, mixer: Mixer, x: Tensor, dtype: torch.dtype) -> None:
    """Compare the functional form under autocast, on projections rounded to ``dtype``, with the same in float32.

    They are equal up to the rounding of what it returns.
    """
    with torch.no_grad(), torch.autocast(torch.get_default_device().type, dtype=dtype):
        args, options = s.args(mixer, x)
        got = s.functional(*args, **options)  # type: ignore[misc]  # there is one
    wide = pytree.tree_map_only(Tensor, lambda a: a.float() if a.is_floating_point() else a, args)
    want = s.functional(*wide, **options).detach()  # type: ignore[misc]  # the same
    same(
        got.float(),
        want,
        f"mixing under autocast to {dtype} is not that of float32",
        tol=torch.finfo(dtype).eps,
        seed=s.seed,
        x=x,
    )
    if mixer.capabilities.streaming:
        with torch.no_grad(), torch.autocast(torch.get_default_device().type, dtype=dtype):
            whole, state = _output_of(s.call(mixer, x)), mixer.init_state(x.shape[0])
            parts = []
            for part in x.split(3, 1):
                y, state = mixer.extend(part, state)
                parts.append(y)
        same(
            torch.cat(parts, 1).float(),
            whole.float(),
            f"streaming under autocast to {dtype} differs",
            start=0,
            tol=BY_DTYPE[dtype],
            seed=s.seed,
            x=x,
        )
