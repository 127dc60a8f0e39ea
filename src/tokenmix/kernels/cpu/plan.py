"""Run a fixed list of the C library's calls over memory that stays where it is."""

from __future__ import annotations

import ctypes
from struct import pack, pack_into

import torch
from torch import Tensor

from . import DTYPES, function, pointers, run_calls

AXES = 5
"""Most dimensions of a tensor in ``Plan.map``: PLAN_AXES of plan.c."""
NUMBERS = {**DTYPES, torch.float64: 3, torch.int64: 4, torch.bool: 5, torch.uint8: 5, torch.int32: 6}
"""The dtypes of single numbers."""
BINARY = ("copy", "add", "sub", "mul", "div", "maximum", "silu_gate")
NUMBERED = ("scale", "shift", "at_least", "at_most")
UNARY = ("neg", "exp", "sin", "cos", "floor", "sigmoid", "silu", "softplus", "rsqrt", "sqrt", "square", "reciprocal")
OPERATIONS = {name: i for i, name in enumerate((*BINARY, *NUMBERED, *UNARY, "abs", "tanh", "relu", "gelu", "log"))}
"""What ``Plan.map`` computes, in the order of plan.c."""

INT8 = 3
NAMES = ("linear", "layer_norm", "map", "reduce", "gather", "attend", "check")
ALIKE = ("rms_forward", "fade_forward", "pairs_forward", "rotate")
CALLS = {name: function(f"plan_{name}", "s") for name in (*NAMES, *ALIKE)}
"""The functions of plan.c, by name; those of ``ALIKE`` are kernels whose arguments are fields there."""


class Plan:
    """Calls of the C library in order, over tensors that the plan keeps alive.

    A run stops at numbers that the plan was not made for, such as NaN; the calls after that have not run then.

    Args:
        whole: the plan that this one will extend, None: it stands alone.
    """

    def __init__(self, whole: Plan | None = None) -> None:
        self._calls: list[tuple[int, bytes]] = []
        self._kept: list[object] = []
        self._fault: Tensor = whole._fault if whole is not None else torch.zeros(1, dtype=torch.int64, device="cpu")
        self._stopped = ctypes.c_int64.from_address(self._fault.data_ptr())
        self._ready: bytes | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, name: str, fields: str, *values: int | float | Tensor | None) -> None:
        """Append a call of a function of plan.c with these fields, as ``struct`` writes them."""
        tensors = [v for v in values if isinstance(v, Tensor)]
        at = iter(pointers(*tensors))
        each = [0 if v is None else next(at) if isinstance(v, Tensor) else v for v in values]
        self.add_packed(CALLS[name], pack(fields, *each), tuple(tensors))

    def add_packed(self, call: object, fields: bytes, keep: tuple[object, ...] = ()) -> None:
        """Append a call with fields that are packed already."""
        address = ctypes.cast(call, ctypes.c_void_p).value  # type: ignore[arg-type]  # a function of the library
        self._calls.append((address or 0, fields))
        self._kept += [call, *keep]
        self._ready = None

    def extend(self, other: Plan) -> None:
        """Append the calls of another plan, which was made for this one or does not stop."""
        self._calls += other._calls
        self._kept += [*other._kept, other]
        self._ready = None

    def keep(self, *things: object) -> None:
        """Keep what the calls read or write alive."""
        self._kept += things

    def run(self) -> bool:
        """Run the calls; return whether all of them ran."""
        if self._ready is None:
            self._ready = self._write()
        run_calls(self._ready)
        return not self._stopped.value

    def _write(self) -> bytes:
        """Write the calls where the library can walk along them."""
        fields = [ctypes.create_string_buffer(each, len(each)) for _, each in self._calls]
        table = ctypes.create_string_buffer(16 * max(len(fields), 1))
        for i, ((address, _), each) in enumerate(zip(self._calls, fields, strict=True)):
            pack_into("2q", table, 16 * i, address, ctypes.addressof(each))
        self._kept += [fields, table]
        return pack("3q", ctypes.addressof(table), len(fields), self._fault.data_ptr())

    def linear(self, x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, y: Tensor) -> None:
        """Write x (B, K) times weight (N, K) transposed, plus the bias (N,), to y (B, N); all contiguous.

        Args:
            weight: in float32 or bfloat16, or int8 with ``scales`` (N,), one for each row.
        """
        kind = INT8 if weight.dtype is torch.int8 else NUMBERS[weight.dtype]
        sizes = y.numel() // max(weight.shape[0], 1), weight.shape[1], weight.shape[0], torch.get_num_threads()
        self.add("linear", "11q", NUMBERS[x.dtype], kind, x, weight, scales, bias, y, *sizes)

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, y: Tensor) -> None:
        """Normalise the rows of x (.., n), contiguous."""
        n = x.shape[-1]
        self.add("layer_norm", "7qd", NUMBERS[x.dtype], x, weight, bias, y, x.numel() // max(n, 1), n, eps)

    def map(self, op: str, y: Tensor, a: Tensor, b: Tensor | None = None, number: float = 1.0) -> None:
        """Write op(a, b) to y number by number; a and b are broadcast to y's shape."""
        shape = tuple(y.shape)
        each = [t if t is None else t.expand(shape) for t in (y, a, b)]
        full, strides = _collapse(shape, [t.stride() for t in each if t is not None])
        while len(strides) < 3:
            strides.append([0] * AXES)
        dtypes = NUMBERS[y.dtype], NUMBERS[a.dtype], 0 if b is None else NUMBERS[b.dtype]
        values = *full, *(n for one in strides for n in one)
        self.add("map", f"7q{4 * AXES}qd", OPERATIONS[op], *dtypes, y, a, b, *values, float(number))

    def reduce(self, a: Tensor, y: Tensor, *, largest: bool) -> None:
        """Write the sum of each row of a (.., n), or its largest number, to y; all contiguous."""
        self.add("reduce", "6q", int(largest), NUMBERS[a.dtype], y, a, y.numel(), a.shape[-1])

    def gather(self, table: Tensor, rows: Tensor, y: Tensor) -> None:
        """Write rows of a table (V, D), at int64 indices, to y; all contiguous."""
        size = table.shape[1] * table.element_size()
        self.add("gather", "5q", size, table, rows, y, rows.numel())

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kept: tuple[Tensor, Tensor, Tensor, Tensor], y: Tensor, scale: float
    ) -> None:
        """Write softmax attention of q (B, H, e) over the kept tokens and a new one, k and v (B, G, e), to y.

        Args:
            kept: memory of keys and values (B, G, most, e) and of which are valid (B, most), to which the new token is
                added, and the number of tokens in it (1,).
        """
        sizes = (*q.shape[:2], kept[0].shape[1], q.shape[2], kept[0].shape[2])
        fields = NUMBERS[q.dtype], q, k, v, *kept, y, *sizes, scale, torch.get_num_threads()
        self.add("attend", "14qdq", *fields)

    def check(self, a: Tensor, *, zero: bool = False) -> None:
        """Stop where a number of a, contiguous, is not finite, or is not 0."""
        self.add("check", "5q", int(zero), NUMBERS[a.dtype], a, a.numel(), self._fault)


def _collapse(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """Join dimensions that lie in a row in all tensors, and return as many as the library takes."""
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for i, n in enumerate(shape):
        if n == 1:
            continue
        if sizes and all(s[-1] == one[i] * n for s, one in zip(steps, strides, strict=True)):
            sizes[-1] *= n
            for s, one in zip(steps, strides, strict=True):
                s[-1] = one[i]
        else:
            sizes.append(n)
            for s, one in zip(steps, strides, strict=True):
                s.append(one[i])
    if not sizes:
        sizes, steps = [1], [[1] for _ in strides]
    if len(sizes) > AXES:
        raise ValueError(f"a plan takes tensors of {AXES} dimensions, got {len(sizes)}")
    before = AXES - len(sizes)
    return [1] * before + sizes, [[0] * before + s for s in steps]
