"""Whether a streaming state belongs to a mixer, and its numbers in the types the mixer keeps them in."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_tracing = torch._C._get_tracing_state


class Field(NamedTuple):
    """What one tensor of a state looks like behind its rows; along ``axis``, if there is one, it has ``least`` or more, as all of its ``group``."""

    name: str
    dtype: torch.dtype
    before: torch.Size
    axis: int
    least: int
    group: str
    behind: torch.Size

    def fits(self, shape: torch.Size, lengths: dict[str, int]) -> bool:
        """Whether a tensor of this shape is such a field, beside others of these lengths."""
        axis = self.axis
        if not axis:
            return bool(shape) and shape[1:] == self.before
        if len(shape) <= axis or shape[1:axis] != self.before or shape[axis + 1 :] != self.behind:
            return False
        return self.least <= shape[axis] == lengths.setdefault(self.group, shape[axis])

    def __str__(self) -> str:
        grows = (f"{self.least} or more" if self.least else self.group,) if self.axis else ()
        sizes = ", ".join(str(n) for n in ("rows", *self.before, *grows, *self.behind))
        return f"{self.dtype} ({sizes})"


class Kind(NamedTuple):
    """The type and the fields of the states of one mixer."""

    type: type
    fields: tuple[Field, ...]


class Kinds(dict[torch.dtype, "Kind | None"]):
    """The kinds a mixer was found to have, by the dtype of its weights; copies and saved files begin anew."""

    def __reduce__(self) -> Any:
        return Kinds, ()


def working_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of the first floating point parameter, or buffer; None without one. Quantised weights say nothing of the numbers between them."""
    return _first(module, "_parameters") or _first(module, "_buffers")


def _first(module: nn.Module, what: str) -> torch.dtype | None:
    for t in module.__dict__[what].values():
        if t is not None and t.is_floating_point():
            return t.dtype
    for child in module._modules.values():
        found = None if child is None else _first(child, what)
        if found is not None:
            return found
    return None


def checked_state(mixer: Any, x: Tensor, state: Any) -> Any:
    """The state as ``mixer`` keeps it, for the rows of x: floats of another float type are converted; what is not its own is refused. Runs for every token."""
    if _tracing() is not None:
        return state
    dtype, kinds = working_dtype(mixer) or x.dtype, mixer.state_kinds
    kind: Any
    try:
        kind = kinds[dtype]
    except KeyError:
        kind = kinds[dtype] = _kind_of(mixer, dtype)
    if kind is None:
        return state
    if type(state) is not kind.type:
        mixer.refuse(f"expects a state of its own, a {kind.type.__name__} as init_state and extend return it, got a {type(state).__name__}")
    rows, on_cpu, device, lengths = x.shape[0], x.is_cpu, x.device, {}  # type: ignore[var-annotated]  # str -> int
    for (_, dtype, before, axis, least, group, behind), a in zip(kind.fields, state, strict=True):
        try:
            shape = a.shape
            if not axis:
                fits = shape == (rows, *before)
            else:
                n = shape[axis]
                fits = shape == (rows, *before, n, *behind) and n >= least and (n == lengths[group] if group in lengths else lengths.setdefault(group, n) == n)
            fits = fits and a.dtype is dtype and (a.is_cpu if on_cpu else a.device == device)
        except (AttributeError, IndexError):
            fits = False
        if not fits:
            return _converted(mixer, x, state, kind)
    return state


def _converted(mixer: Any, x: Tensor, state: Any, kind: Kind) -> Any:
    """The state with its floats converted, or the reason why it cannot be this mixer's."""
    lengths: dict[str, int] = {}
    for field, a in zip(kind.fields, state, strict=True):
        if not isinstance(a, Tensor):
            mixer.refuse(f"expects tensors in its state, got {field.name} as a {type(a).__name__}")
        if a.ndim and a.shape[0] != x.shape[0] and field.fits(a.shape, dict(lengths)):
            mixer.refuse(f"the state has {a.shape[0]} rows and x has {x.shape[0]}; pick rows with reorder(state, index)")
        if not (a.dtype is field.dtype or a.is_floating_point() and field.dtype.is_floating_point) or not field.fits(a.shape, lengths):
            mixer.refuse(f"expects {field.name} of its state as {field}, got {a.dtype} {tuple(a.shape)}; a state belongs to the mixer that made it")
        if a.device != x.device:
            mixer.refuse(f"expects its state on {x.device}, where x is, got {field.name} on {a.device}")
    return kind.type(*(a.to(field.dtype) for field, a in zip(kind.fields, state, strict=True)))


def _kind_of(mixer: Any, dtype: torch.dtype) -> Kind | None:
    """What the states of the mixer look like, read off one that has seen nothing; None where that does not tell."""
    try:
        empty = (mixer.empty_state if mixer.causal else mixer.empty_context_state)(1, device="meta", dtype=dtype)
    except NotImplementedError:
        return None
    names = getattr(empty, "_fields", ())
    if not names or not all(isinstance(a, Tensor) for a in empty):
        return None
    grows, groups = not mixer.causal or _grows(mixer), mixer.state_lengths()
    fields = []
    for name, a in zip(names, empty, strict=True):
        axis = next((i for i in range(1, a.ndim) if a.shape[i] == 0), 0) if grows else 0
        group = groups.get(name, "tokens" if axis else "")
        axis = 0 if not group else axis or 1
        sizes = (a.shape[1:], 0, a.shape[1:0]) if not axis else (a.shape[1:axis], a.shape[axis], a.shape[axis + 1 :])
        fields.append(Field(name, a.dtype, sizes[0], axis, sizes[1], group, sizes[2]))
    return Kind(type(empty), tuple(fields))


def _grows(mixer: Any) -> bool:
    """Whether the state of a causal mixer gets longer with the sequence, by its own account."""
    try:
        return mixer.mixing_cost(1).state != mixer.mixing_cost(1 << 20).state
    except ValueError:  # a mixer that declares no cost
        return True
