"""The one place that chooses how a function runs: the eager form in plain torch, torch's own fused attention, or a kernel of ours.

Rule of ``auto``: the fastest path that supports the device, dtype and option at hand. A backend that is asked for by name, in the call, by
``use_backend`` or by TOKENMIX_BACKEND, raises for anything it lacks; what is exported is always the eager form, and so are second derivatives.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import MixerError
from ..kernels import cpu, triton

Backend = Literal["auto", "eager", "cpu", "triton"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)
AUTO_RULE = (
    "auto: on the CPU the C kernels, on CUDA the Triton kernels, for AFT, Hydra, External and linear attention in float32, bfloat16 and float16 where the call "
    "needs nothing they lack and plain torch is not faster at its shapes; softmax attention on torch SDPA (plain matrix products in float64 and on export); "
    "everything else on its eager torch form"
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
_default = os.environ.get("TOKENMIX_BACKEND", "auto")  # a plain global: torch.compile can guard on it


def check_backend(name: str) -> str:
    """Return ``name`` if it is a backend that can run here, else raise."""
    if name not in BACKENDS:
        raise MixerError(f"backend={name!r} is unknown; choose one of {', '.join(BACKENDS)}.")
    if name in KERNELS and not KERNELS[name].available():
        raise MixerError(f"backend={name!r}: {KERNELS[name].why_not()}; use 'auto' or 'eager' until then.")
    return name


def _asked(backend: str) -> str:
    return check_backend(_default if backend == "auto" else backend)


def choose(
    who: str,
    backend: str,
    *tensors: Tensor | None,
    on: tuple[str, ...] = (),
    lacks: str | None = None,
    slower: bool = False,
) -> str:
    """Choose how a call of ``who`` runs: "cpu" or "triton", a kernel of ours; "fused", torch's fused attention; or "eager", plain torch.

    Args:
        tensors: every floating point argument; the first decides device and dtype, which kernels ask of all.
        on: what ``who`` has beside its eager form, of "cpu", "triton" and "fused".
        lacks: what this call needs and no kernel has, as a phrase; None where there is nothing.
        slower: whether plain torch is faster at these sizes: ``auto`` then takes it, and a kernel has to be asked for by name.
    """
    asked, first = _asked(backend), next(t for t in tensors if t is not None)
    kernel = asked if asked in KERNELS else "triton" if first.is_cuda else "cpu"
    if asked != "eager" and not exporting():
        why = lacks or (f"has no {kernel} kernel" if kernel not in on else _misfit(kernel, tensors, first))
        if asked in KERNELS and why:
            raise MixerError(f"{who}: backend={asked!r}: {why}; use backend='auto' or 'eager'.")
        if asked in KERNELS or why is None and not slower and KERNELS[kernel].available() and not _transformed():
            return kernel
        if "fused" in on and first.dtype != torch.float64 and not _transformed():
            return "fused"
    return "eager"


def steps(new: tuple[Tensor, ...], past: tuple[Tensor, ...]) -> bool:
    """Whether new tokens may join a state on the C kernels, which know no gradient: the rule of ``auto`` in the shortest form, as it runs for every token.

    Args:
        new: contiguous tensors (B, L, .) of one floating point dtype.
        past: contiguous tensors of the state; that they are of the type and size the kernel reads is for the caller to ask.
    """
    if (
        not _cpu
        or _default in _NO_STEPS
        or _compiling()
        or _modes()
        or _functorch() is not None
        or _tracing() is not None
    ):
        return False
    dtype, graph = new[0].dtype, _grad_mode()
    if dtype not in cpu.DTYPES:
        return False
    for t in new:
        if (
            t.dtype is not dtype
            or not t.is_cpu
            or not t.is_contiguous()
            or type(t) not in _PLAIN
            or graph
            and t.requires_grad
        ):
            return False
    for t in past:  # noqa: SIM110  (a loop is faster)
        if not t.is_cpu or not t.is_contiguous() or type(t) not in _PLAIN or graph and t.requires_grad:
            return False
    return True


def masks(k: Tensor, valid: Tensor | None) -> bool:
    """Whether a mask is one byte for each of the keys k (B, L, .) on the CPU, as the C kernels read it."""
    return valid is None or valid.dtype is torch.bool and valid.is_cpu and valid.shape == k.shape[:2]


def _misfit(name: str, tensors: tuple[Tensor | None, ...], first: Tensor) -> str | None:
    """Why these tensors cannot go to the kernels of this name."""
    device = "cuda" if name == "triton" and not triton.INTERPRETED else "cpu"
    for t in tensors:
        if t is None:
            continue
        if t.device.type != device:
            return f"its kernels take {device} tensors, got one on {t.device}"
        if t.dtype not in cpu.DTYPES or t.dtype != first.dtype:
            return f"its kernels take float32, bfloat16 or float16, the same for all arguments, got {first.dtype} and {t.dtype}"
    return None


def watched() -> bool:
    """Tell whether a compiler, a dispatch mode or torch.func runs the call, so that its tensors may hold no numbers to look at."""
    return _compiling() or bool(_modes()) or _functorch() is not None


def exporting() -> bool:
    """Whether torch.export or ONNX traces the call: exported programs hold standard operators only."""
    return torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()


def _transformed() -> bool:
    """Whether torch.func's vmap, jvp or grad, or forward differentiation, is at work: they go through the eager form."""
    return not torch.compiler.is_compiling() and (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Set the default backend of this process inside a ``with`` block."""
    global _default
    before, _default = _default, check_backend(name)
    try:
        yield
    finally:
        _default = before
