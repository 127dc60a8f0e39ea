"""The choice of how a function runs: the eager form in plain torch, torch's fused attention, or a tokenmix kernel.

``auto`` selects the fastest path that supports the device, the dtype and the options. A backend requested by name, in
the call, by ``use_backend`` or by TOKENMIX_BACKEND, raises MixerError for anything it does not support. Exported
programs and second derivatives always use the eager form.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import MixerError
from ..system.tracing import keep_result
from . import cpu, triton
from .recompute import SETTINGS, Setting
from .recording import recorder

Backend = Literal["auto", "eager", "cpu", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
AUTO_RULE = (
    "auto: AFT, Hydra, External, linear attention and recurrences in float32, bfloat16 and float16 run on the C "
    "kernels (CPU) or the Triton kernels (CUDA), if these exist, support the call and plain torch is not faster at its "
    "shapes; softmax attention runs on torch SDPA (plain matrix products in float64 and on export); everything else "
    "runs in its eager torch form"
)
KERNELS = {"cpu": cpu, "triton": triton}
_cpu = cpu.available()
_PLAIN = (Tensor, torch.nn.Parameter)
_NO_STEPS = ("eager", "triton")
_compiling, _grad_mode = torch.compiler.is_compiling, torch.is_grad_enabled
_modes, _functorch, _tracing = (
    torch._C._len_torch_dispatch_stack,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._get_tracing_state,
)
_default = os.environ.get("TOKENMIX_BACKEND", "auto")  # of the process, outside of all blocks
_blocks: ContextVar[tuple[list[str], ...]] = ContextVar("_blocks", default=())
"""The open blocks of this thread or task, outermost first: each a list with its backend, distinguished by identity."""


class _Traced(threading.local):
    """What ``torch.compile`` reads instead, and guards on, since it traces no ContextVar: one value for each thread."""

    def __init__(self) -> None:
        self.backend: str | None = None
        self.lowers, self.standard = False, False


_traced = _Traced()


def check_backend(name: str) -> str:
    """Return ``name`` if it is a backend that can run here; otherwise raise MixerError."""
    if name not in BACKENDS:
        raise MixerError(f"backend={name!r} is unknown; choose one of {', '.join(BACKENDS)}.")
    if name in KERNELS and not KERNELS[name].available():
        raise MixerError(f"backend={name!r}: {KERNELS[name].why_not()}; use 'auto' or 'eager' until then.")
    return name


def default_backend() -> str:
    """Return the backend that "auto" stands for here: that of the innermost open block, or the process's."""
    if _compiling():
        return _traced.backend or _default
    blocks = _blocks.get()
    return blocks[-1][0] if blocks else _default


def _resolve_backend(backend: str) -> str:
    return check_backend(default_backend() if backend == "auto" else backend)


def choose(
    who: str,
    backend: str,
    *tensors: Tensor | None,
    on: tuple[str, ...] = (),
    lacks: str | None = None,
    slower: bool = False,
) -> str:
    """Choose the backend of a call of ``who``.

    Args:
        who: name of the function, for error messages.
        backend: the requested backend; "auto" stands for that of the innermost open block, or of the process.
        tensors: every floating-point argument; the first decides the device and dtype, which kernels require of all.
        on: the paths that ``who`` has besides its eager form, out of "cpu", "triton", "fused", "onnx" and "standard".
        lacks: what this call needs and no kernel supports, as a phrase; None if there is nothing.
        slower: whether plain torch is faster at these sizes; a kernel then runs only if requested by name.

    Returns:
        "cpu" or "triton" for a tokenmix kernel, "fused" for torch's fused attention, or "eager" for plain torch.

    Raises:
        MixerError: the requested backend is unknown, is not available or does not support the call.
    """
    asked, first = _resolve_backend(backend), next(t for t in tensors if t is not None)
    if _traced.lowers and backend == "auto":
        fits = all(t is None or t.dtype is torch.float32 for t in tensors)
        written = "onnx" in on or _traced.standard and "standard" in on
        return "cpu" if written and lacks is None and fits else "eager"
    kernel = asked if asked in KERNELS else "triton" if first.is_cuda else "cpu"
    if asked != "eager" and not is_exporting():
        why = lacks or (f"has no {kernel} kernel" if kernel not in on else _misfit(kernel, tensors, first))
        if asked in KERNELS and why:
            raise MixerError(f"{who}: backend={asked!r}: {why}; use backend='auto' or 'eager'.")
        if asked in KERNELS or why is None and not slower and KERNELS[kernel].available() and not _is_transformed():
            return kernel
        if "fused" in on and first.dtype != torch.float64 and not _is_transformed():
            return "fused"
    return "eager"


def steps(new: tuple[Tensor, ...], past: tuple[Tensor, ...], *, derives: bool = False) -> bool:
    """Return whether new tokens of a stream can run on the C kernels, most of which have no gradient there.

    This is the rule of ``auto``, kept short because it is evaluated for every token. A tensor whose negation torch
    postpones is left to torch, as C would read the numbers that are still to be negated.

    Args:
        new: contiguous tensors (B, L, .) of one floating-point dtype.
        past: contiguous tensors of the state; the caller checks that they have the dtype and size the kernel reads.
        derives: whether the kernel has a gradient.
    """
    if (
        not _cpu
        or _compiling()
        or (blocks[-1][0] if (blocks := _blocks.get()) else _default) in _NO_STEPS
        or _modes()
        and recorder() is None
        or _functorch() is not None
        or _tracing() is not None
    ):
        return False
    if not derives and forward_ad._current_level >= 0:
        return False
    dtype, graph = new[0].dtype, _grad_mode() and not derives
    if dtype not in cpu.DTYPES:
        return False
    for t in new:
        if (
            t.dtype is not dtype
            or not t.is_cpu
            or not t.is_contiguous()
            or type(t) not in _PLAIN
            or t.is_neg()
            or graph
            and t.requires_grad
        ):
            return False
    for t in past:  # noqa: SIM110  (a loop is faster)
        if not t.is_cpu or not t.is_contiguous() or type(t) not in _PLAIN or t.is_neg() or graph and t.requires_grad:
            return False
    return not derives or not _is_transformed()


def masks(k: Tensor, valid: Tensor | None) -> bool:
    """Return whether a mask holds one byte for each key of k (B, L, .) on the CPU, as the C kernels read it.

    None, no mask, is accepted.
    """
    return (
        valid is None
        or valid.dtype is torch.bool
        and valid.is_cpu
        and valid.shape == k.shape[:2]
        and type(valid) in _PLAIN
    )


def _misfit(name: str, tensors: tuple[Tensor | None, ...], first: Tensor) -> str | None:
    """Return why the kernels ``name`` do not support these tensors, as a phrase, or None if they do."""
    device = "cuda" if name == "triton" and not triton.INTERPRETED else "cpu"
    for t in tensors:
        if t is None:
            continue
        if t.device.type != device:
            return f"its kernels take {device} tensors, got one on {t.device}"
        if t.dtype not in cpu.DTYPES or t.dtype != first.dtype:
            return (
                "its kernels take float32, bfloat16 or float16, the same for all arguments, "
                f"got {first.dtype} and {t.dtype}"
            )
    return None


def is_intercepted() -> bool:
    """Return whether a compiler, a dispatch mode or torch.func runs the call.

    Its tensors may then hold no values to inspect.
    """
    return _compiling() or bool(_modes()) and recorder() is None or _functorch() is not None


@keep_result  # torch 2.9 and 2.10 compile is_exporting() as True
def is_exporting() -> bool:
    """Return whether torch.export, ONNX or torch.jit.trace traces the call.

    Such programs hold standard operators only, and no choice by length, which may differ in a later call.
    """
    return torch.compiler.is_exporting() or _tracing() is not None


def lowers() -> bool:
    """Return whether operators stay whole in a traced program, as ``lower_operators`` asks."""
    return _traced.lowers


@contextmanager
def lower_operators(*, standard: bool = False) -> Iterator[None]:
    """Let functions trace their operators as one node each inside a ``with`` block, for an exporter.

    Args:
        standard: also operators that are written as one standard operator of ONNX.
    """
    before = _traced.lowers, _traced.standard
    _traced.lowers, _traced.standard = True, standard
    try:
        yield
    finally:
        _traced.lowers, _traced.standard = before


def _is_transformed() -> bool:
    """Return whether vmap, jvp or grad of torch.func or forward-mode AD is active; they use the eager form."""
    return not torch.compiler.is_compiling() and (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Set the default backend inside a ``with`` block, for this thread or task of asyncio alone.

    A backward pass takes the paths that its forward pass took, also after the block or in a thread of autograd.

    Raises:
        MixerError: the backend is unknown or cannot run here.
    """
    check_backend(name)
    if _compiling():
        before, _traced.backend = _traced.backend, name
        try:
            yield
        finally:
            _traced.backend = before
        return
    block: list[str] = [name]
    _set_blocks((*_blocks.get(), block))
    try:
        yield
    finally:  # blocks of generators may end in any order
        _set_blocks(tuple(each for each in _blocks.get() if each is not block))


@contextmanager
def _reopen(blocks: tuple[list[str], ...]) -> Iterator[None]:
    """Let these be the open blocks inside a ``with`` block."""
    before = _blocks.get()
    _set_blocks(blocks)
    try:
        yield
    finally:
        _set_blocks(before)


def _set_blocks(blocks: tuple[list[str], ...]) -> None:
    _blocks.set(blocks)
    _traced.backend = blocks[-1][0] if blocks else None


SETTINGS.append(Setting(_blocks.get, _reopen))  # read for every token: no frame of Python
