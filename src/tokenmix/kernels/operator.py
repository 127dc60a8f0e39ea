"""Registration of kernels as torch operators, which autograd, torch.compile and the dispatcher support."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import compress
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..types import Options
from . import triton
from .backend import lowers
from .shapes import check_shapes, parse_declaration, refuse_shapes

LIBRARY = torch.library.Library("tokenmix", "DEF")  # noqa: TOR901  (this package's own, defined once)
OPERATORS: dict[str, Operator] = {}
"""Every operator, by name."""

REMEMBERED = 1024
"""Calls of an operator, by sizes, dtypes and options, that need not be checked again."""

Results = tuple[Tensor, ...]


class Operator:
    """A kernel as the torch operators ``tokenmix::NAME`` and ``tokenmix::NAME_backward``.

    Call it as ``operator(*inputs, *options)``. The kernel itself is in ``kernels/cpu/NAME.py``,
    ``kernels/triton/NAME.py`` or both, each with three functions:

        forward(*inputs, **options, save)         the result y, and what the backward pass needs, empty unless ``save``;
                                                  y alone if it needs nothing
        backward(g, *inputs, *kept, **options)    a gradient for each input that has one, empty where the input is None
        saved_shapes(*inputs, **options)          the shapes of what ``forward`` saves, all float32

    The dispatcher selects the module by the device of the tensors; under Triton's interpreter, which runs on the CPU,
    it selects Triton's. The shapes of results and the first derivative are derived from these functions; the second
    derivative is that of the eager form.

    Args:
        name: name of the operator and of its files.
        inputs: names, sizes and dtypes of the tensors, see ``kernels.shapes.parse_declaration``. A call whose tensors
            do not fit them is refused before an address leaves Python.
        options: the arguments after the inputs, in torch's schema language, such as "SymInt T, bool causal".
        saves: names of what ``forward`` returns besides y.
        eager: the same function of inputs and options in plain torch; needed for second derivatives.
        keeps_result: whether the backward pass also needs y, which then comes before what was saved.
        shape: function of inputs and options that returns the shape of y; None for the shape of the first input
            without "?".
        fits: what sizes and options must satisfy besides, as in ``kernels.shapes.check_shapes``.
        on: the kernels that exist, out of "cpu" and "triton"; and "onnx" if ``export.lowering`` writes the operator,
            "standard" if it does so only where ONNX's standard operators are asked for.
    """

    def __init__(
        self,
        name: str,
        inputs: str,
        options: str,
        *,
        saves: Sequence[str],
        eager: Callable[..., Tensor],
        keeps_result: bool = False,
        shape: Callable[..., Sequence[int]] | None = None,
        fits: Callable[[dict[str, Any], Options], bool] | None = None,
        on: Sequence[str] = ("cpu", "triton"),
    ):
        self.name, self.eager, self.shape, self.on = name, eager, shape, tuple(on)
        self.modules: dict[str, ModuleType] = {}
        self.fitting: set[object] = set()
        self.inputs, self.each, self.fits = inputs, parse_declaration(inputs), fits
        kept = [f"Tensor {one}" for one in (["y"] if keeps_result else []) + list(saves)]
        self.differentiable = tuple(one.differentiable for one in self.each)
        self.main = next(i for i, one in enumerate(self.each) if not one.optional)
        self.count, self.kept, self.keeps_result = len(self.each), slice(0 if keeps_result else 1, None), keeps_result
        given = [options] if options else []
        self.options = tuple(option.split()[-1] for one in given for option in one.split(","))
        tensors = ", ".join(f"Tensor{'?' * one.optional} {one.name}" for one in self.each)
        grads = ", ".join("Tensor" for _ in compress(self.each, self.differentiable))
        results = ", ".join("Tensor" for _ in range(1 + len(saves)))
        forward = f"({', '.join([tensors, *given, 'bool save'])}) -> ({results})"
        self.forward = self._define(name, forward, self._run, self._fake)
        self.backward = self._define(
            f"{name}_backward",
            f"({', '.join(['Tensor g', tensors, *kept, *given])}) -> ({grads})",
            self._run_backward,
            self._fake_backward,
        )
        self.whole = self._define_whole(f"({', '.join([tensors, *given])}) -> Tensor")
        self._derivative(name, self._keep, self._derive)
        self._derivative(f"{name}_backward", self._keep_twice, self._derive_twice)
        OPERATORS[name] = self

    def __call__(self, *args: Any) -> Tensor:
        """Compute y from inputs and options, in order; save tensors for backward if a gradient is required."""
        if lowers():
            return self.whole(*args)
        grad = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in compress(args, self.differentiable)
        )
        found = self.forward(*args, grad)
        return found if isinstance(found, Tensor) else found[0]

    def module(self, where: str) -> ModuleType:
        """Return the kernel module for "cpu" or "triton"; import it on first use, because triton is optional."""
        if where not in self.modules:
            self.modules[where] = import_module(f".{where}.{self.name}", __package__)
        return self.modules[where]

    def _define(
        self, name: str, schema: str, run: Callable[..., Results | Tensor], fake: Callable[..., Results | Tensor]
    ) -> torch._ops.OpOverload:
        LIBRARY.define(f"{name}{schema}")
        for key, on_cuda in (("CPU", False), ("CUDA", True)):
            where = self._kernel_of(on_cuda)
            if not on_cuda or where == "triton":
                LIBRARY.impl(name, partial(run, where), key)
        torch.library.register_fake(f"tokenmix::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.tokenmix, name).default

    def _define_whole(self, schema: str) -> torch._ops.OpOverload:
        """Define ``tokenmix::NAME_whole``, the eager form as one node, for an exporter; it checks no sizes."""
        name = f"{self.name}_whole"

        def fake(*args: Any) -> Tensor:
            like, inputs = args[self.main], args[: self.count]
            options = self._named_options(args[self.count :])
            return like.new_empty(like.shape if self.shape is None else self.shape(*inputs, **options))

        LIBRARY.define(f"{name}{schema}")
        LIBRARY.impl(name, self.eager, "CompositeExplicitAutograd")
        torch.library.register_fake(f"tokenmix::{name}", fake, lib=LIBRARY)
        return getattr(torch.ops.tokenmix, name).default

    def _derivative(
        self, name: str, keep: Callable[..., None], derive: Callable[..., tuple[Tensor | None, ...]]
    ) -> None:
        torch.library.register_autograd(f"tokenmix::{name}", derive, setup_context=keep, lib=LIBRARY)

    def _kernel_of(self, on_cuda: bool) -> str:
        """Return whose kernel runs on tensors of this device: Triton's interpreter takes those on the CPU."""
        on_triton = on_cuda or triton.INTERPRETED and triton.available()
        return "triton" if on_triton and "triton" in self.on else "cpu"

    def _named_options(self, options: Sequence[object]) -> Options:
        return dict(zip(self.options, options, strict=True))

    def _run(self, where: str, *args: Any) -> Results | Tensor:
        inputs, options = args[: self.count], self._named_options(args[self.count : -1])
        self._check(inputs, options)
        return self.module(where).forward(*inputs, **options, save=args[-1])

    def _check(self, inputs: Sequence[Tensor | None], options: Options) -> None:
        """Refuse tensors that do not fit each other; sizes, dtypes and options that fitted before are remembered."""
        described = tuple([None if a is None else (a.shape, a.dtype, a.device) for a in inputs])
        key = (described, tuple([tuple(v) if type(v) is list else v for v in options.values()]))
        if key not in self.fitting:
            self._compare(inputs, options)
            if len(self.fitting) >= REMEMBERED:
                self.fitting.clear()
            self.fitting.add(key)

    def _compare(self, inputs: Sequence[Tensor | None], options: Options) -> None:
        check_shapes(self.name, self.inputs, self.each, inputs, options, inputs[self.main], self.fits)

    def _run_backward(self, where: str, *args: Any) -> Results | Tensor:
        n, module = len(args) - len(self.options), self.module(where)
        g, inputs, kept, options = (
            args[0],
            args[1 : 1 + self.count],
            args[1 + self.count : n],
            self._named_options(args[n:]),
        )
        main = inputs[self.main]
        self._check(inputs, options)
        y = tuple(main.shape if self.shape is None else self.shape(*inputs, **options))
        wanted = [(y, main.dtype)] * (1 + self.keeps_result)
        wanted += [(tuple(shape), torch.float32) for shape in module.saved_shapes(*inputs, **options)]
        given = (g, *kept)
        if any(
            a is None or (tuple(a.shape), a.dtype) != one or a.device != main.device
            for a, one in zip(given, wanted, strict=True)
        ):
            refuse_shapes(f"{self.name}_backward", f"{self.inputs} and what its forward gave and kept", given, options)
        return _unwrap_single(module.backward(g, *inputs, *(a.contiguous() for a in kept), **options))

    def _fake(self, *args: Any) -> Results | Tensor:
        inputs, options, like, save = (
            args[: self.count],
            self._named_options(args[self.count : -1]),
            args[self.main],
            args[-1],
        )
        self._compare(inputs, options)
        shapes = self.module(self._kernel_of(like.is_cuda)).saved_shapes(*inputs, **options)
        y = like.new_empty(like.shape if self.shape is None else self.shape(*inputs, **options))
        return _unwrap_single((y, *(like.new_empty(shape if save else (0,), dtype=torch.float32) for shape in shapes)))

    def _fake_backward(self, g: Tensor, *args: Any) -> Results | Tensor:
        like = args[self.main]
        inputs = compress(args, self.differentiable)
        return _unwrap_single(tuple(like.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs))

    def _keep(self, ctx: Any, inputs: Sequence[Any], output: Results | Tensor) -> None:
        ctx.options = inputs[self.count : -1]
        results = (output,) if isinstance(output, Tensor) else output
        ctx.save_for_backward(*inputs[: self.count], *results[self.kept])

    def _derive(self, ctx: Any, g: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        inputs, kept = saved[: self.count], saved[self.count :]
        found = self.backward(g, *inputs, *(a.detach() for a in kept), *ctx.options)
        grads = iter(found if isinstance(found, tuple) else (found,))
        rest = [None] * (len(ctx.options) + 1)  # the options and ``save``
        return *self._at_inputs(inputs, grads, empty=True), *rest

    def _keep_twice(self, ctx: Any, inputs: Sequence[Any], output: object) -> None:
        ctx.options = inputs[len(inputs) - len(self.options) :]
        ctx.save_for_backward(*inputs[: 1 + self.count])
        ctx.rest = len(inputs) - 1 - self.count

    def _derive_twice(self, ctx: Any, *weights: Tensor | None) -> tuple[Tensor | None, ...]:
        g, *inputs = ctx.saved_tensors

        def call_eager(*leaves: Tensor | None) -> Tensor:
            given = iter(leaves)
            return self.eager(
                *(next(given) if has else x for x, has in zip(inputs, self.differentiable, strict=True)), *ctx.options
            )

        dg, found = second_derivative(call_eager, list(compress(inputs, self.differentiable)), g, weights)
        return dg, *self._at_inputs(inputs, iter(found)), *[None] * ctx.rest

    def _at_inputs(
        self, inputs: Sequence[Tensor | None], found: Iterator[Tensor | None], *, empty: bool = False
    ) -> Iterator[Tensor | None]:
        """Yield a gradient for each input, in order: the next one found, or None if the input has no gradient.

        With ``empty``, ``found`` includes an empty tensor for each input that is None; it is dropped.
        """
        for x, has in zip(inputs, self.differentiable, strict=True):
            d = next(found) if has else None
            yield None if x is None and empty else d


def _unwrap_single(results: Results) -> Results | Tensor:
    """Return the tensor of a one-element tuple, as torch expects of an operator with one result."""
    return results[0] if len(results) == 1 else results


def second_derivative(
    eager: Callable[..., Tensor], inputs: Sequence[Tensor | None], g: Tensor, weights: Sequence[Tensor | None]
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Differentiate sum(weights_i * d_i) with respect to g and the inputs.

    d_i is the gradient of sum(g * eager(*inputs)) with respect to input i.

    Returns:
        The gradient for g, and one for each input; None where it is zero or the input is None.
    """
    with torch.enable_grad():
        leaves = [None if x is None else own_node(x) for x in inputs]
        g = own_node(g)
        present = [x for x in leaves if x is not None]
        first = iter(torch.autograd.grad(eager(*leaves), present, g, create_graph=True, allow_unused=True))
        pairs = [(next(first), w) for x, w in zip(leaves, weights, strict=True) if x is not None]
        terms = [(d * w).sum() for d, w in pairs if d is not None and w is not None and d.requires_grad]
        if not terms:
            return None, [None] * len(inputs)
        total, twice = torch.stack(terms).sum(), torch.is_grad_enabled()
        found = iter(torch.autograd.grad(total, [g, *present], create_graph=twice, allow_unused=True))
        return next(found), [None if x is None else next(found) for x in leaves]


def own_node(x: Tensor) -> Tensor:
    """Return x as a separate node of the graph.

    A derivative with respect to it then excludes paths through which other tensors, above all g, depend on x.
    """
    return x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
