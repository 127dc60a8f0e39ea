"""Record what a function does to tensors on the CPU, as a plan of C calls that repeats it on new numbers.

As a CUDA graph does on a GPU: the function runs once, and its kernels are noted with the addresses of their arguments.
What depends on weights and constants alone is computed at that time and not again. torch's own operators are replaced
by the plan's; a function that needs others, or looks at numbers, is refused.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from struct import pack
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from . import cpu
from .cpu import decode
from .cpu.plan import ALIKE, CALLS, NUMBERS, Plan

_FLOATS = (ctypes.c_float, ctypes.c_double)
_lock = threading.Lock()


class NotRecordable(Exception):
    """The function does something that no plan repeats; the message says what."""


class _Local(threading.local):
    recorder: Recorder | None = None


_local = _Local()


def recorder() -> Recorder | None:
    """Return the recorder that notes what this thread computes, if there is one."""
    return _local.recorder


Narrow = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""Turns the weights (N, K) of a product into narrower ones and the scales of their rows."""


class Recorder(TorchDispatchMode):
    """Add what is computed inside ``with recorder:`` to a plan.

    Args:
        plan: gets the calls.
        fixed: weights and buffers, whose numbers do not change between runs.
        narrow: see ``Narrow``; None: the weights as they are.
    """

    def __init__(self, plan: Plan, fixed: Iterable[Tensor], narrow: Narrow | None = None):
        super().__init__()
        self.plan, self.narrow = plan, narrow
        self.fixed = {_memory(t) for t in fixed}
        self._inside = 0  # how many operators that note their own calls are running

    def __enter__(self) -> Recorder:
        _load_kernels()
        _lock.acquire()
        self._new, decode._new = decode._new, self._note_new
        self._names = {}
        for name, each in list(vars(cpu._library).items()):
            if name.startswith(f"tm_{cpu.isa()}_") and each.argtypes is not None:
                self._names[name.removeprefix(f"tm_{cpu.isa()}_")] = each
                each.errcheck = _note
        _local.recorder = self
        return super().__enter__()

    def __exit__(self, *why: Any) -> None:
        try:
            super().__exit__(*why)
        finally:
            _local.recorder = None
            for each in self._names.values():
                del each.errcheck
            decode._new = self._new
            _lock.release()

    def check_finite(self, *tensors: Tensor) -> None:
        """Make the plan stop where these numbers are not finite; without a plan such numbers take another way."""
        with _disable_current_modes():
            for t in tensors:
                if _memory(t) not in self.fixed:
                    self.plan.check(self.make_dense(t))

    def check_zero(self, t: Tensor) -> None:
        """Make the plan stop where these numbers, which a kernel writes, are not 0."""
        self.plan.check(t, zero=True)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, Tensor, Tensor, Tensor], scale: float
    ) -> Tensor:
        """Plan softmax attention of one token over those kept in memory that does not move; see ``Plan.attend``."""
        with _disable_current_modes():
            q, k, v = (self.make_dense(a.flatten(0, 1)) for a in (q, k, v))
            y = torch.empty_like(q)
            self.plan.attend(q, k, v, kept, y, scale)
            return y[:, None]

    def _note_new(self, *args: Any) -> Tensor:
        new = self._new(*args)
        if _local.recorder is self:
            self.plan.keep(new)
        return new

    def _note_call(self, result: object, call: Any, args: tuple[Any, ...]) -> object:
        """Note a call of the library."""
        if self._inside:
            return result
        name = next(name for name, each in self._names.items() if each is call)
        if name.startswith("plan_"):
            return result
        if len(args) == 1 and isinstance(args[0], bytes):
            self.plan.add_packed(call, args[0])
            return result
        if name not in ALIKE:
            raise NotRecordable(f"the kernel {name}")
        letters = "".join("d" if kind in _FLOATS else "q" for kind in call.argtypes)
        self.plan.add_packed(CALLS[name], pack(letters, *(0 if a is None else a for a in args)))
        return result

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        inputs = [t for t in pytree.tree_leaves((args, given)) if isinstance(t, Tensor)]
        name = op.name().split("::")[1].split(".")[0]
        own = op.namespace == "tokenmix"
        if own and name not in _WRITERS:  # copies inside of it would not be seen
            with _disable_current_modes():
                args = pytree.tree_map_only(Tensor, self.make_dense, args)
        result = self._call(op, args, given, own and name in _WRITERS)
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        self.plan.keep(*inputs, *outputs)
        places = {_memory(t) for t in inputs}
        if not outputs or all(_memory(t) in places for t in outputs):
            if op._schema.is_mutable:
                raise NotRecordable(f"{name}, which writes to its argument")
            if not outputs and inputs and any(_memory(t) not in self.fixed for t in inputs):
                raise NotRecordable("a look at numbers")
            return result
        if name.startswith("empty"):
            return result
        if name in _CONSTANT or all(t in self.fixed for t in places):
            self.fixed |= {_memory(t) for t in outputs}
            return result
        if own and name not in _WRITERS:  # its kernel has been noted
            return result
        write = _WRITERS.get(name)
        if write is None:
            raise NotRecordable(f"torch's {name}")
        with _disable_current_modes():
            write(self, result, *args, **given)
        return result

    def _call(self, op: Any, args: Any, given: Any, whole: bool) -> Any:
        self._inside += whole
        try:
            return op(*args, **given)
        finally:
            self._inside -= whole

    def make_dense(self, t: Tensor) -> Tensor:
        """Return t if it is contiguous, else a copy that the plan renews."""
        if t.is_contiguous():
            return t
        copy = t.contiguous()
        self.plan.map("copy", copy, t)
        return copy


def _note(result: object, call: Any, args: tuple[Any, ...]) -> object:
    """Note a call; ctypes calls this after each, in all threads.

    It lives as long as the module, since a call that began before a recording's end returns to it afterwards.
    """
    plan = _local.recorder
    return result if plan is None else plan._note_call(result, call, args)


@cache
def _load_kernels() -> None:
    """Look up all functions of the library; operators load theirs late, and their first calls would not be noted."""
    for file in Path(cpu.__file__).parent.glob("*.py"):
        if file.stem not in ("__init__", "__main__", "build"):
            import_module(f"{cpu.__name__}.{file.stem}")


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr() or id(t.untyped_storage())


def _write_linear(r: Recorder, y: Tensor, x: Tensor, columns: Tensor, bias: Tensor | None) -> None:
    """Write x (B, K) @ columns (K, N) + bias; the columns are weights (N, K) transposed."""
    weight = columns.t()
    if _memory(weight) not in r.fixed or not weight.is_contiguous() or bias is not None and bias.ndim != 1:
        raise NotRecordable("a product of two tensors that change")
    if weight.dtype not in (torch.float32, torch.bfloat16) or x.dtype not in NUMBERS or x.dtype is torch.float64:
        raise NotRecordable(f"a product in {weight.dtype}")
    scales = None
    if r.narrow is not None:
        weight, scales = r.narrow(weight)
    r.plan.linear(r.make_dense(x), weight, scales, None if bias is None else r.make_dense(bias), y)


def _write_addmm(r: Recorder, y: Tensor, bias: Tensor, x: Tensor, columns: Tensor, **given: Any) -> None:
    if given.get("beta", 1) != 1 or given.get("alpha", 1) != 1:
        raise NotRecordable("a product with factors")
    _write_linear(r, y, x, columns, bias)


def _write_binary(name: str) -> Callable[..., None]:
    def write(r: Recorder, y: Tensor, a: Tensor, b: Any, *, alpha: float = 1.0, **given: Any) -> None:
        if given.get("rounding_mode") is not None:
            raise NotRecordable("a rounded division")
        if isinstance(b, Tensor):
            r.plan.map(name, y, a, b, alpha)
        elif name in ("add", "sub"):
            r.plan.map("shift", y, a, number=b * alpha if name == "add" else -b * alpha)
        else:
            r.plan.map("scale", y, a, number=b if name == "mul" else 1.0 / b)

    return write


def _write_unary(name: str) -> Callable[..., None]:
    def write(r: Recorder, y: Tensor, a: Tensor) -> None:
        r.plan.map(name, y, a)

    return write


def _write_softplus(r: Recorder, y: Tensor, a: Tensor, beta: float = 1, threshold: float = 20) -> None:
    if beta != 1 or threshold != 20:
        raise NotRecordable("a softplus of another scale")
    r.plan.map("softplus", y, a)


def _write_gelu(r: Recorder, y: Tensor, a: Tensor, *, approximate: str = "none") -> None:
    if approximate != "none":
        raise NotRecordable("an approximate gelu")
    r.plan.map("gelu", y, a)


def _write_power(r: Recorder, y: Tensor, a: Tensor, power: float) -> None:
    if power != 2:
        raise NotRecordable(f"the power {power}")
    r.plan.map("square", y, a)


def _write_copy(r: Recorder, y: Tensor, a: Tensor, *args: Any, **given: Any) -> None:
    r.plan.map("copy", y, a)


def _write_cat(r: Recorder, y: Tensor, parts: list[Tensor], dim: int = 0) -> None:
    start = 0
    for each in parts:
        r.plan.map("copy", y.narrow(dim, start, each.shape[dim]), each)
        start += each.shape[dim]


def _write_stack(r: Recorder, y: Tensor, parts: list[Tensor], dim: int = 0) -> None:
    for i, each in enumerate(parts):
        r.plan.map("copy", y.select(dim, i), each)


def _write_sum(
    r: Recorder, y: Tensor, a: Tensor, dims: list[int] | None = None, keepdim: bool = False, **given: Any
) -> None:
    _write_reduced(r, y, a, dims, largest=False)


def _write_largest(r: Recorder, y: Tensor, a: Tensor, dims: list[int] | None = None, keepdim: bool = False) -> None:
    _write_reduced(r, y, a, dims, largest=True)


def _write_reduced(r: Recorder, y: Tensor, a: Tensor, dims: list[int] | None, *, largest: bool) -> None:
    last = {d % a.ndim for d in dims or ()} == {a.ndim - 1}
    if not last or y.dtype is not a.dtype or a.numel() == 0:
        raise NotRecordable("a sum over other than the last dimension")
    r.plan.reduce(r.make_dense(a), y, largest=largest)


def _write_layer_norm(
    r: Recorder,
    y: tuple[Tensor, ...],
    x: Tensor,
    shape: list[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> None:
    if len(shape) != 1:
        raise NotRecordable("a norm over several dimensions")
    r.plan.layer_norm(r.make_dense(x), weight, bias, eps, y[0])


def _write_embedding(r: Recorder, y: Tensor, table: Tensor, rows: Tensor, *options: Any) -> None:
    if _memory(table) not in r.fixed or rows.dtype is not torch.int64:
        raise NotRecordable("a look-up in a table that changes")
    r.plan.gather(r.make_dense(table), r.make_dense(rows), y)


def _write_clamp(op: str) -> Callable[..., None]:
    def write(r: Recorder, y: Tensor, a: Tensor, limit: float) -> None:
        r.plan.map(op, y, a, number=limit)

    return write


def _write_where(r: Recorder, y: Tensor, condition: Tensor, a: Tensor, b: Tensor) -> None:
    if _memory(condition) not in r.fixed or bool(condition.any()) != bool(condition.all()):
        raise NotRecordable("a choice between numbers")
    r.plan.map("copy", y, a if bool(condition.any()) else b)


def _write_gate(r: Recorder, y: Any, gate: Tensor, x: Tensor, *save: bool) -> None:
    r.plan.map("silu_gate", y[0] if isinstance(y, tuple | list) else y, gate, x)


_WRITERS: dict[str, Callable[..., None]] = {
    "addmm": _write_addmm,
    "mm": lambda r, y, x, columns: _write_linear(r, y, x, columns, None),
    "add": _write_binary("add"),
    "sub": _write_binary("sub"),
    "mul": _write_binary("mul"),
    "div": _write_binary("div"),
    "maximum": _write_binary("maximum"),
    **{
        name: _write_unary(name)
        for name in (
            "neg",
            "exp",
            "sin",
            "cos",
            "floor",
            "sigmoid",
            "silu",
            "rsqrt",
            "sqrt",
            "reciprocal",
            "abs",
            "tanh",
            "relu",
            "log",
        )
    },
    "softplus": _write_softplus,
    "gelu": _write_gelu,
    "pow": _write_power,
    "_to_copy": _write_copy,
    "clone": _write_copy,
    "cat": _write_cat,
    "stack": _write_stack,
    "sum": _write_sum,
    "amax": _write_largest,
    "native_layer_norm": _write_layer_norm,
    "embedding": _write_embedding,
    "clamp_min": _write_clamp("at_least"),
    "clamp_max": _write_clamp("at_most"),
    "where": _write_where,
    "silu_gate": _write_gate,
}
_CONSTANT = {"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"}
"""Operators whose results depend on the shapes of their arguments alone."""
