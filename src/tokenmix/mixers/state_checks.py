"""Checks that a streaming state belongs to a mixer, and conversion of its floating point tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..functional.sums.softmax import FLOOR

_tracing = torch._C._get_tracing_state


class Field(NamedTuple):
    """The expected dtype and shape of one tensor of a state, after its batch axis.

    If ``axis`` is not 0, the length along it may vary from ``minimum`` upwards, and is equal for all fields of one
    ``group``. ``leading`` and ``trailing`` are the sizes before and after ``axis``; without an axis, ``leading`` holds
    all sizes.
    """

    name: str
    dtype: torch.dtype
    leading: torch.Size
    axis: int
    minimum: int
    group: str
    trailing: torch.Size

    def fits(self, shape: torch.Size, lengths: dict[str, int]) -> bool:
        """Return whether a tensor of this shape matches the field, given the lengths of the groups seen so far."""
        axis = self.axis
        if not axis:
            return bool(shape) and shape[1:] == self.leading
        if len(shape) <= axis or shape[1:axis] != self.leading or shape[axis + 1 :] != self.trailing:
            return False
        return self.minimum <= shape[axis] == lengths.setdefault(self.group, shape[axis])

    def __str__(self) -> str:
        grows = (f"{self.minimum} or more" if self.minimum else self.group,) if self.axis else ()
        sizes = ", ".join(str(n) for n in ("rows", *self.leading, *grows, *self.trailing))
        return f"{self.dtype} ({sizes})"


class Kind(NamedTuple):
    """The type and the fields of the states of one mixer."""

    type: type
    fields: tuple[Field, ...]


class Kinds(dict[torch.dtype, "Kind | None"]):
    """The ``Kind`` of a mixer's states by the dtype of its weights. Copies and saved files start empty."""

    def __reduce__(self) -> Any:
        return Kinds, ()


def working_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the first floating point parameter, or else buffer; None if there is none.

    Quantised weights do not determine the dtype of activations.
    """
    left: list[Any] = [module]
    while left:  # a stack rather than a recursion, as this runs for every token
        inner = left.pop()
        for t in inner._parameters.values():
            if t is not None and t.is_floating_point():
                return t.dtype
        if inner._modules:
            left += filter(None, reversed(inner._modules.values()))
    for t in module.buffers():
        if t.is_floating_point():
            return t.dtype
    return None


def checked_state(mixer: Any, x: Tensor, state: Any) -> Any:
    """Return the state as ``mixer`` keeps it for the rows of x.

    Floating point tensors of another floating point dtype are converted; anything else that does not match raises
    MixerError. This runs for every token, so the common case is checked inline.
    """
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
        mixer.refuse(
            f"expects its own state, a {kind.type.__name__} from init_state or extend, got a {type(state).__name__}"
        )
    rows, on_cpu, device, lengths = x.shape[0], x.is_cpu, x.device, {}  # type: ignore[var-annotated]  # str -> int
    for (_, dtype, leading, axis, minimum, group, trailing), a in zip(kind.fields, state, strict=True):
        try:
            shape = a.shape
            if not axis:
                fits = shape == (rows, *leading)
            else:
                n = shape[axis]
                fits = (
                    shape == (rows, *leading, n, *trailing)
                    and n >= minimum
                    and (n == lengths[group] if group in lengths else lengths.setdefault(group, n) == n)
                )
            fits = fits and a.dtype is dtype and (a.is_cpu if on_cpu else a.device == device)
        except (AttributeError, IndexError):
            fits = False
        if not fits:
            return _convert_state(mixer, x, state, kind)
    return state


def _convert_state(mixer: Any, x: Tensor, state: Any, kind: Kind) -> Any:
    """Convert the state's floating point tensors, or raise MixerError with the reason why the state does not match."""
    lengths: dict[str, int] = {}
    for field, a in zip(kind.fields, state, strict=True):
        if not isinstance(a, Tensor):
            mixer.refuse(f"expects tensors in its state, got {field.name} as a {type(a).__name__}")
        if a.ndim and a.shape[0] != x.shape[0] and field.fits(a.shape, dict(lengths)):
            mixer.refuse(
                f"the state has {a.shape[0]} rows and x has {x.shape[0]}; pick rows with reorder(state, index)"
            )
        if not (a.dtype is field.dtype or a.is_floating_point() and field.dtype.is_floating_point) or not field.fits(
            a.shape, lengths
        ):
            got = f"{a.dtype} {tuple(a.shape)}"
            mixer.refuse(
                f"expects {field.name} of its state as {field}, got {got}; a state belongs to the mixer that made it"
            )
        if a.device != x.device:
            mixer.refuse(f"expects its state on {x.device}, where x is, got {field.name} on {a.device}")
    return kind.type(*(_cast_field(field, a) for field, a in zip(kind.fields, state, strict=True)))


def _cast_field(field: Field, a: Tensor) -> Tensor:
    """Return a tensor of a state in the field's dtype.

    The scale of sums over no keys is ``FLOOR``, which half precision rounds to -inf, and -inf minus itself is NaN.
    """
    return a.to(field.dtype).clamp_min(FLOOR) if field.name == "m" else a.to(field.dtype)


def _kind_of(mixer: Any, dtype: torch.dtype) -> Kind | None:
    """Derive the expected state from the mixer's empty one; return None where that is not possible."""
    try:
        empty = mixer.empty_state(1, device="meta", dtype=dtype)
    except NotImplementedError:
        return None
    names = getattr(empty, "_fields", ())
    if not names or not all(isinstance(a, Tensor) for a in empty):
        return None
    grows, groups = not mixer.causal or _state_grows(mixer), mixer.state_lengths()
    fields = []
    for name, a in zip(names, empty, strict=True):
        axis = next((i for i in range(1, a.ndim) if a.shape[i] == 0), 0) if grows else 0
        group = groups.get(name, "tokens" if axis else "")
        axis = 0 if not group else axis or 1
        sizes = (a.shape[1:], 0, a.shape[1:0]) if not axis else (a.shape[1:axis], a.shape[axis], a.shape[axis + 1 :])
        fields.append(Field(name, a.dtype, sizes[0], axis, sizes[1], group, sizes[2]))
    return Kind(type(empty), tuple(fields))


def _state_grows(mixer: Any) -> bool:
    """Return whether the state of a causal mixer grows with the sequence, according to its cost formula."""
    try:
        return mixer.mixing_cost(1).state != mixer.mixing_cost(1 << 20).state
    except ValueError:  # the mixer declares no cost
        return True
