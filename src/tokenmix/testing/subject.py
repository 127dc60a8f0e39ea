"""The mixer under test: how it is built, called and perturbed, with its reference, functional form and grid."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..mixers import MIXERS, Facts, Inputs, Mixer
from ..types import Options
from . import inputs

LENGTH, CONTEXT = 10, 7
MASKS = ("causal", "key_mask", "attn_mask", "backend")


@dataclass(frozen=True)
class Subject:
    """A mixer class with the options it is built with, at test size."""

    cls: type[nn.Module]
    options: Options = field(default_factory=dict)
    dim: int = 8
    reference: Callable[..., Tensor] | None = None
    functional: Callable[..., Tensor] | None = None
    grid: tuple[int, ...] | None = None
    prefix: int = 0
    seed: int = 0
    compile_backend: str = "aot_eager"

    @property
    def title(self) -> str:
        """Class and options, for messages."""
        given = ", ".join(f"{k}={v!r}" for k, v in self.options.items())
        place = f" grid={self.grid} prefix={self.prefix}" if self.grid else ""
        return f"{self.cls.__name__}(dim={self.dim}{', ' if given else ''}{given}){place} seed={self.seed}"

    def raw(self, **overrides: object) -> Any:
        """Build the mixer as its constructor leaves it."""
        return self.cls(self.dim, **{**self.options, **overrides})

    def build(self, *, dtype: torch.dtype = torch.float64, seed: int | None = None, **overrides: object) -> Any:
        """Build the mixer in eval mode with noise on every parameter, so that those that start at zero or tiny take
        part.
        """
        seed = self.seed if seed is None else seed
        torch.manual_seed(seed)
        mixer = self.raw(**overrides).to(torch.float64)
        return perturb(mixer, seed=seed).to(dtype).eval()

    @property
    def length(self) -> int:
        """The number of tokens in tests: the grid's, or LENGTH cut to max_len."""
        if self.grid is not None:
            return self.prefix + prod(self.grid)
        return min(LENGTH, self.options.get("max_len") or LENGTH)

    def x(
        self, rows: int = 2, length: int | None = None, *, stream: int = 0, dtype: torch.dtype = torch.float64
    ) -> Tensor:
        """Draw a seeded normal input (rows, length, dim); another ``stream`` gives other numbers."""
        return inputs.noise(
            rows, self.length if length is None else length, self.dim, seed=1000 * stream + self.seed + 1, dtype=dtype
        )

    def context_length(self, mixer: nn.Module) -> int:
        """Return a length for a context, different from that of x where the mixer has room."""
        limit = getattr(mixer, "max_context_len", None)
        return CONTEXT if limit is None else min(CONTEXT, limit)

    def place(self, context: Tensor | None = None) -> Options:
        """Return the grid arguments of a call, where the subject has a grid."""
        return {"grid": self.grid, "prefix": self.prefix} if self.grid is not None and context is None else {}

    def call(self, mixer: Callable[..., Tensor], x: Tensor, context: Tensor | None = None, **given: object) -> Tensor:
        """Call forward with the subject's grid."""
        given = {**self.place(context), **given}
        return mixer(x, **given) if context is None else mixer(x, context, **given)

    def args(self, mixer: Any, x: Tensor, context: Tensor | None = None, **given: Any) -> tuple[tuple, Options]:
        """Return the arguments of the functional form, every keyword spelled out."""
        full = {
            "positions": None,
            "key_mask": None,
            "attn_mask": None,
            "grid": None,
            "prefix": 0,
            **self.place(context),
            **given,
        }
        return mixer.functional_args(Inputs(x, context, **full))

    def options_for_length(self, length: int) -> Options:
        """Return options that make room for this length, where the mixer has parameters per position."""
        return {name: length for name in ("max_len", "max_context_len") if self.options.get(name) is not None}

    def limit(self, mixer: nn.Module) -> int:
        """Return the number that positions stay below."""
        if self.grid is not None:
            return self.length
        return getattr(mixer, "max_len", None) or 2 * self.length


def subject(target: str | type[nn.Module], options: Options | None = None, **more: Any) -> Subject:
    """Build the Subject of a class, or of a name of ``MIXERS``.

    It has the functional form that the class names and, in this library, its reference.
    """
    cls = MIXERS[target] if isinstance(target, str) else target
    facts: Facts = cls.facts if is_mixer(cls) else Facts()  # type: ignore[attr-defined]  # a Mixer
    if facts.causal_only:
        options = {"causal": True} | (options or {})
    # Of a subclass that computes something else, the form of its parent says nothing.
    if facts.form is not None and "form" in facts.stated:
        more["functional"] = more.get("functional") or facts.functional_form()
        if more["functional"].__module__.startswith("tokenmix."):
            from .. import reference

            more["reference"] = more.get("reference") or getattr(reference, more["functional"].__name__, None)
    return Subject(cls, dict(options or {}), **more)


def is_mixer(cls: type) -> bool:
    """Return whether a class keeps the whole contract; a plain module can keep only some promises."""
    return isinstance(cls, type) and issubclass(cls, Mixer)


def perturb(module: nn.Module, *, seed: int, scale: float = 0.5) -> nn.Module:
    """Add N(0, scale) to every floating point parameter, in place, so that parameters that start at zero matter."""
    generator = torch.Generator().manual_seed(seed + 77)
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point():
                p.add_(
                    inputs.draw_tensor(torch.randn, p.shape, generator=generator, dtype=torch.float64).to(p),
                    alpha=scale,
                )
    return module


@contextmanager
def freeze(mixer: nn.Module) -> Iterator[None]:
    """Keep hard decisions (buckets, clusters, samples) fixed while inputs vary, so that derivatives exist.

    A module that decides has a context manager ``frozen()``, inside which the decisions of its first call are used
    again.
    """
    with ExitStack() as stack:
        for module in mixer.modules():
            if callable(getattr(module, "frozen", None)):
                stack.enter_context(module.frozen())  # type: ignore[operator]  # callable, as just asked
        yield


def allowed_pairs(
    rows: int,
    queries: int,
    keys: int,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Return the pairs that may be attended, (rows, queries, keys) bool, without any code of the library."""
    ok = torch.ones(rows, queries, keys, dtype=torch.bool)
    if causal:
        ok &= torch.arange(keys)[None, None, :] <= torch.arange(queries)[None, :, None]
    if key_mask is not None:
        ok &= key_mask[:, None, :]
    if attn_mask is not None:
        ok &= attn_mask if attn_mask.ndim == 3 else attn_mask[None]
    return ok


def valid_queries(y: Tensor, given: Options) -> Tensor:
    """Return which outputs y (B, T, D) of a call are specified, (B, T) bool: those that its key mask does not hide.

    Outputs at masked positions may be anything finite. The key mask of a context hides no query.
    """
    mask = None if given.get("context") is not None else given.get("key_mask")
    return torch.ones(y.shape[:2], dtype=torch.bool, device=y.device) if mask is None else mask


class Roles(NamedTuple):
    """Which positional argument of a functional form holds keys, values (None: it has none) and log-weights.

    The first argument is what asks: (B, T, .). Keys are called ``k``, values ``v``, log-weights ``w`` or ``kernel``; a
    form without ``k`` mixes its first argument.
    """

    keys: int
    values: int | None
    biases: tuple[int, ...]


def roles(form: Callable[..., Tensor]) -> Roles:
    """Return the roles of the positional arguments of a functional form."""
    names = [p.name for p in inspect.signature(form).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    find = {name: i for i, name in enumerate(names)}
    return Roles(find.get("k", 0), find.get("v"), tuple(find[n] for n in ("w", "kernel") if n in find))


def leaf_names(form: Callable[..., Tensor], args: tuple) -> list[str]:
    """Name the floating point tensors among positional arguments of a form: "k", or "w[0]" inside of a tuple."""
    return [
        name + pytree.keystr(path)
        for name, value in zip(inspect.signature(form).parameters, args, strict=False)
        for path, leaf in pytree.tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def structural(options: Options) -> Options:
    """Return the options that a reference takes besides its one mask."""
    return {k: v for k, v in options.items() if k not in MASKS}


def gradients(loss: Tensor, leaves: dict[str, Tensor], *, keep_graph: bool = False) -> dict[str, Tensor]:
    """Compute d loss / d leaf by name, zero where the loss does not depend on it."""
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, retain_graph=keep_graph)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(leaves.items(), grads, strict=True)}
