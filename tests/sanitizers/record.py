"""Record every call that the library receives, with all of its memory: ``record.py OUT``.

The calls are made while the forms of ``fuzz_forms`` and the functions of ``MORE`` run. They are recorded so that a C
program, ``harness.c``, can repeat them under a sanitizer, without Python and torch. Functions and signatures are those
that ctypes has, and a buffer is as long as the tensor it came from, so a wrapper that allocates too little is found as
well as a kernel that writes too much.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
import sys
import unittest.mock
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

import test_kernels_decode as decode
from fuzz_forms import FORMS, MISSING, derived, drawn, mapped, upstream
from kernel_checks import structs
from tokenmix import MixerError, functional
from tokenmix.functional.aft_forget import aft_forget_chunk
from tokenmix.functional.linear import linear_chunk
from tokenmix.functional.sums.features import empty_features
from tokenmix.functional.sums.kernel_attention import empty_sums, extend_chunk
from tokenmix.kernels import cpu, tokenwise
from tokenmix.kernels.cpu.plan import Plan
from tokenmix.models import LM, LMConfig

SEEDS = 40  # calls of each form
LIMITS = {"most": 140, "wide": 90}
LETTERS = {kind: letter for letter, kind in cpu._CTYPES.items()}
FUNCTION = type(cpu._library.tm_hash)


def extended_scan() -> None:
    """AFT-simple over chunks of new tokens after a state."""
    from tokenmix.kernels.cpu import aft_simple as scan

    for dtype, gate in ((torch.float32, True), (torch.bfloat16, False), (torch.float16, True)):
        past = tuple(torch.full((2, 37), value, dtype=torch.float64) for value in (-1e30, 0.0, 0.0))
        for L in (1, 5, 65):
            q, k, v = (torch.randn(2, L, 37).to(dtype) for _ in range(3))
            _, past, _ = scan.extend(q if gate else None, k, v, torch.rand(2, L) < 0.8 if L > 1 else None, past)


def extended_with_gradients() -> None:
    """AFT-forget, AFT-simple, linear attention and Hydra over new tokens: gradients, holes, features beyond a strip."""
    for dtype, gate, heads in (
        (torch.float32, "sigmoid", None),
        (torch.bfloat16, None, 3),
        (torch.float16, "tanh", 13),
    ):
        leaves = [torch.randn(2, 70, 39).to(dtype).requires_grad_() for _ in range(4)]
        before = tuple(torch.full((2, 39), value, dtype=torch.float64) for value in (-1e30, 0.0, 0.0))
        for stop in (1, 64, 70):
            q, k, v, g = (a[:, :stop] for a in leaves)
            mask = torch.rand(2, stop) < 0.8
            for y, after in (
                aft_forget_chunk(q, k, v, -g.abs(), before, key_mask=mask, heads=heads, gate=gate),
                decode.aft_chunk.aft_simple_chunk(q, k, v, before, key_mask=mask, gate=gate),
            ):
                torch.autograd.grad(y.sum().double() + after[1].sum() + after[2].sum(), leaves, allow_unused=True)
            y, after = linear_chunk(q, k, v, empty_features(2, 3, 13, 13), heads=3, feature="elu", key_mask=mask)
            torch.autograd.grad(y.sum().double() + after[1].sum(), leaves[:3])
            options = {"heads": 39, "feature": "mean" if gate else "cosine", "normalise": False, "eps": 1e-6}
            y, sums = extend_chunk(q, k, v, empty_sums(2, 39, 39, softmax=False), valid=mask, **options)
            torch.autograd.grad(y.sum().double() + sums[0].sum(), leaves[:3])


def not_finite() -> None:
    """Run every form on numbers that are not finite, where they may be attended.

    The results are worth nothing, but nothing may be undefined.
    """
    for name in FORMS:
        for seed in range(0 if name in MISSING else 12):
            d, args, _, options = drawn(name, seed, **LIMITS)
            hit = mapped(
                args,
                lambda a, d=d: torch.where(
                    torch.rand(a.shape) < 0.05, d.one(float("nan"), float("inf"), -float("inf"), 3e38), a
                ).to(a.dtype),
            )
            with suppress(MixerError):
                derived(name, hit, options, None, "cpu")


@torch.no_grad()
def streams() -> None:
    """Every mixer that decodes on the kernels, token by token and in chunks, with masks."""
    for row in decode.ROWS:
        for dtype in decode.TOL:
            mixer, dim = decode.built(row, dtype=dtype), 72
            x, mask = torch.randn(2, 29, dim).to(dtype), torch.rand(2, 29) < 0.7
            decode.stream(mixer, x, (5, 1, 20) if dtype == torch.float32 else (1, 3), key_mask=mask)


def wide_streams() -> None:
    """More features than fit a strip, more keys than fit a block or a segment, numbers that are not finite."""
    for R in (0, 63, 64, 300):
        q, k, v = (torch.where(torch.rand(2, 3, 136) < 0.01, torch.inf, torch.randn(2, 3, 136)) for _ in range(3))
        kept, live = (torch.randn(2, R, 136), torch.randn(2, R, 136), torch.rand(2, R) < 0.8), torch.rand(2, 3) < 0.8
        far, w = decode.aft_chunk.empty_past(2, 136, 136), torch.randn(2, 1, 3, R + 3).double()
        decode.step.ring(q, (k, v, live), kept, far, w, None, heads=False)
        decode.step.full(q, (k, v, live), kept, w)
        decode.full.extend(
            q, torch.cat([kept[0], k], 1), torch.cat([kept[1], v], 1), w[:, 0], torch.cat([kept[2], live], 1)
        )


def convolutions() -> None:
    """The convolution of new tokens, of more features than fit a strip."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size, new in ((2, 1), (4, 1), (4, 9)):
            x, weight = torch.randn(2, size - 1 + new, 70).to(dtype), torch.randn(70, size).to(dtype)
            at = torch.arange(x.shape[1]).expand(2, -1)
            (*rest, old), (*more, last) = (
                [a[:, part].contiguous() for a in (x, at >= 1, at)] for part in (slice(size - 1), slice(size - 1, None))
            )
            decode.step.conv(weight, (*more, last), (*rest, old))


def wide_grids() -> None:
    """AFT-conv on grids whose rows are several tiles, with filters of several pieces."""
    for grid, size, prefix, heads in (((2, 31), 5, 0, 2), ((3, 17), 31, 1, 3), ((20, 2), 27, 0, 1)):
        T = grid[0] * grid[1] + prefix
        q, k, v, w = (
            torch.randn(2, T, 18),
            torch.randn(2, T, heads),
            torch.randn(2, T, 18),
            torch.randn(heads, size, size),
        )
        leaves = [a.requires_grad_() for a in (q, k, v, w)]
        torch.autograd.grad(functional.aft_conv(*leaves, grid=grid, prefix=prefix, backend="cpu").sum(), leaves)


def token_by_token() -> None:
    """RMS norm, rotary positions and the gate of a SwiGLU, forward and backward, rows of all lengths."""
    forms = tokenwise
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for n in (2, 30, 64, 134):
            x, gate = (torch.randn(2, 5, 3, n).to(dtype).requires_grad_() for _ in range(2))
            angles = torch.rand(2, 5, n // 2)
            weight = torch.randn(n).to(dtype).requires_grad_()
            for y in (
                forms.rms_norm(x, weight, backend="cpu"),
                forms.rms_norm(x, backend="cpu"),
                forms.silu_gate(gate, x, backend="cpu"),
                forms.rotate(x, angles.cos(), angles.sin(), backend="cpu"),
                forms.rotate(x, angles[:1].cos(), angles[:1].sin(), interleaved=True, backend="cpu"),
            ):
                y.sum().backward()


def recurrences() -> None:
    """Gated linear recurrences, forward and backward: rules, groups, holes, documents, widths that fill no vector."""
    before = torch.get_num_threads()
    for threads, rule, (hq, hk, hv), (dk, dv), T in (
        (1, "gated_delta", (2, 2, 2), (33, 17), 70),
        (3, "gated_delta", (1, 1, 2), (8, 40), 150),
        (3, "gated", (4, 2, 2), (64, 5), 33),
        (1, "delta", (1, 1, 1), (256, 256), 17),
        (1, "linear", (2, 1, 2), (1, 1), 1),
    ):
        torch.set_num_threads(threads)
        for packed in (False, True):
            rows = 1 if packed else 3
            q, k, v = (torch.randn(rows, T, h, d) for h, d in ((hq, dk), (hk, dk), (hv, dv)))
            given = [q, torch.nn.functional.normalize(k, dim=-1), v, torch.randn(2 if packed else rows, hv, dk, dv)]
            leaves = [a.requires_grad_() for a in given]
            gates: dict[str, Any] = {}
            if "gated" in rule:
                gates["decay"] = -torch.rand(rows, T, hv, *([dk] if packed else [])).requires_grad_()
            if "delta" in rule:
                gates["beta"] = torch.rand(rows, T, hv).requires_grad_()
            gates |= {"key_mask": torch.rand(rows, T) < 0.8, "positions": torch.arange(T).remainder(9).expand(rows, T)}
            gates |= {"cu_seqlens": torch.tensor([0, T // 3, T])} if packed else {}
            y, state = functional.recurrence(*leaves[:3], past=leaves[3], rule=rule, **gates, backend="cpu")
            torch.autograd.grad(y.sum() + state.sum(), leaves)
    torch.set_num_threads(before)


@torch.no_grad()
def plans() -> None:
    """The calls of plans of whole models, made at once instead of noted: rows, dtypes, narrow weights, odd widths."""
    rotary = {"name": "attention", "heads": 3, "kv_heads": 1, "positions": {"name": "rotary"}, "qk_norm": "rms"}
    rows = {"name": "gated_delta", "heads": 3}, {"name": "aft_pairs", "heads": 3, "rank": 2}, {"name": "aft_forget"}
    for rows_at_once, dtype, weights in (
        (1, torch.float32, None),
        (3, torch.bfloat16, None),
        (2, torch.float32, "int8"),
    ):
        for options in ({"norm_type": "layer", "mlp": "gelu"}, {"norm_type": "rms", "mlp": "swiglu", "tied": True}):
            config = LMConfig(dim=18, max_len=20, vocab=37, mixers=(rotary, *rows), logit_cap=9.0, **options)
            model = LM(config).to(dtype).eval()
            with unittest.mock.patch.object(Plan, "add_packed", _call_at_once):
                model.decoder(rows_at_once, weights=weights)


def _call_at_once(plan: Plan, call: Any, fields: bytes, keep: tuple[object, ...] = ()) -> None:
    if not isinstance(call, FUNCTION):  # a kernel itself has just run
        plan.keep(*keep)
        call(fields)


MORE: list[Callable[[], None]] = [
    extended_scan,
    extended_with_gradients,
    not_finite,
    streams,
    wide_streams,
    convolutions,
    wide_grids,
    token_by_token,
    recurrences,
    plans,
]
"""List what uses kernels beside the forms: streams, large shapes.

A kernel that nothing here calls is named by test_sanitizers.
"""


def modules() -> list[ModuleType]:
    """Every module of wrappers."""
    names = sorted(path.stem for path in Path(str(cpu.__file__)).parent.glob("*.py"))
    return [
        importlib.import_module(f"{cpu.__name__}.{name}")
        for name in names
        if name not in ("__init__", "__main__", "build")
    ]


class Recorder:
    """Stands between the wrappers and the library."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.known: dict[int, tuple[int, StorageWeakRef]] = {}  # address -> how many bytes, and whose
        self.names: list[str] = []

    def pointer(self, a: Tensor | None) -> int | None:
        """The address of a tensor, remembering how far its memory goes."""
        if a is None:
            return None
        size = (
            a.element_size() * (1 + sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True)))
            if a.numel()
            else 0
        )
        before = self.known.get(a.data_ptr())
        if before and not before[1].expired():
            size = max(size, before[0])
        self.known[a.data_ptr()] = size, StorageWeakRef(a.untyped_storage())
        return a.data_ptr()

    def pointers(self, *tensors: Tensor | None) -> list[int | None]:
        """``cpu.pointers``, remembering how far the memory of each tensor goes."""
        return [self.pointer(a) for a in tensors]

    def wrap(self, raw: Any) -> Callable[..., None]:
        """A function of the library that writes down what it is given."""
        name, signature = raw.__name__.split("_", 2)[2], "".join(LETTERS[kind] for kind in raw.argtypes)
        if signature == "s":
            return self.unpacked(raw, name)

        def call(*args: Any) -> None:
            assert len(args) == len(signature), name
            self.file.write(struct.pack("<i32sqq", 1, name.encode(), len(signature), len(self.names)))
            for letter, value in zip(signature, args, strict=True):
                self.write(name, letter, value)
            self.names.append(name)
            raw(*args)

        return call

    def unpacked(self, raw: Any, name: str) -> Callable[[bytes], None]:
        """The same of a function that takes one struct: its fields are written as arguments."""
        fields = structs()[name]
        form = struct.Struct(fields.replace("p", "q").replace("l", "q"))

        def call(packed: bytes) -> None:
            self.file.write(struct.pack("<i32sqq", 1, name.encode(), len(fields), len(self.names)))
            for letter, value in zip(fields, form.unpack(packed), strict=True):
                self.write(name, letter, value)
            self.names.append(name)
            raw(packed)

        return call

    def seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function, remembering the memory of every tensor that goes in or comes out."""

        def call(*args: Any, **options: Any) -> Any:
            found = pytree.tree_map_only(Tensor, lambda a: (self.pointer(a), a)[1], (args, options))
            result = function(*found[0], **found[1])
            return pytree.tree_map_only(Tensor, lambda a: (self.pointer(a), a)[1], result)

        return call

    def write(self, name: str, letter: str, value: Any) -> None:
        """Write one argument.

        Its letter, its number or the length of its memory, where that begins in a cache line, and what it holds.
        """
        if letter != "p":
            self.file.write(struct.pack("<cqdq", letter.encode(), int(value) if letter in "il" else 0, float(value), 0))
            return
        if not value:
            self.file.write(struct.pack("<cqdq", b"0", 0, 0.0, 0))
            return
        assert value in self.known, f"{name}: an address that did not come from pointers()"
        size, storage = self.known[value]
        assert not storage.expired(), f"{name}: a tensor was freed between pointers() and the call"
        self.file.write(struct.pack("<cqdq", b"p", size, 0.0, value % 64))
        self.file.write(ctypes.string_at(value, size))

    def install(self) -> None:
        """Take the place of ``pointers`` and of every function of the library in every module of wrappers."""
        for key in ("_new", "simple", "ring", "pairs", "taps", "conv", "full", "hydra", "linear", "forget"):
            setattr(decode.step, key, self.seen(getattr(decode.step, key)))
        for module in [cpu, *modules()]:
            for key, value in list(vars(module).items()):
                if value is pointers:
                    setattr(module, key, self.pointers)
                elif isinstance(value, FUNCTION):
                    setattr(module, key, self.wrap(value))
                elif isinstance(value, dict) and any(isinstance(v, FUNCTION) for v in value.values()):
                    value.update({k: self.wrap(v) for k, v in value.items() if isinstance(v, FUNCTION)})


pointers = cpu.pointers


def main() -> None:
    """Record, and print the names of the functions that were called."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with Path(sys.argv[1]).open("wb") as file:
        recorder = Recorder(file)
        recorder.install()
        for name in FORMS:
            for seed in range(0 if name in MISSING else SEEDS):
                d, args, _, options = drawn(name, seed, **LIMITS)
                with suppress(MixerError):  # what a kernel lacks
                    derived(name, args, options, upstream(d, args[0]), "cpu")
        for more in MORE:
            more()
        file.write(struct.pack("<i", 0))
    print(" ".join(sorted(set(recorder.names))))


if __name__ == "__main__":
    main()
