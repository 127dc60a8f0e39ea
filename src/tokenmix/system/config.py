"""Convert frozen dataclasses to JSON and back, strictly.

Unknown fields and values of the wrong type are refused, with the nearest names.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from typing import Any, TypeVar

from ..errors import MixerError
from ..types import Record
from .removed_fields import removed_fields

T = TypeVar("T")
C = TypeVar("C", bound="Json")


class Json:
    """A base class of config dataclasses, with the conversion to JSON and back.

    Where one of several configs may stand, each has a constant ``kind``, by which JSON tells them apart.
    """

    def to_json(self) -> Record:
        """Return plain JSON values, which ``from_json`` reads."""
        return to_json(self)

    @classmethod
    def from_json(cls: type[C], data: Record) -> C:
        """Build a config from JSON values; unknown fields and values of the wrong type are refused."""
        return from_json(cls, data)


class OpenJson(Json):
    """A base class of configs any of which may stand in a field of its type, also of kinds that are added later."""

    @classmethod
    def kinds(cls, kind: object = None) -> list[type[Json]]:
        """Return the classes, the default first; ``kind`` is the one that JSON names."""
        raise NotImplementedError


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Return the names closest to a misspelt one, or all of them, as the end of an error message."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"


def to_json(value: object) -> Any:
    """Convert a dataclass (or tuple, dict, scalar) to plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return found | _kind(type(value))
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    return value


def from_json(cls: type[T], data: object, *, where: str = "") -> T:
    """Build ``cls`` from JSON values; ``where`` is the dotted path that error messages name."""
    name = where or cls.__name__
    if not isinstance(data, dict):
        raise MixerError(f"config: {name} must be an object, got {data!r}.")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # T is a dataclass
    if kind := _kind(cls):
        if data.get("kind", kind["kind"]) != kind["kind"]:
            raise MixerError(f"config: {name} is of kind {kind['kind']!r}, got {data['kind']!r}.")
        data = {key: value for key, value in data.items() if key != "kind"}
    for key, value in removed_fields(cls).items():
        if data.get(key, value) != value:
            raise MixerError(f"config: {name}.{key} is no longer an option, always {value!r}, got {data[key]!r}.")
    data = {key: value for key, value in data.items() if key not in removed_fields(cls)}
    for key in data:
        if key not in fields:
            raise MixerError(f"config: {name} has no field {key!r}; {nearest(key, fields)}.")
    for key, f in fields.items():
        if key not in data and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise MixerError(f"config: {name} needs the field {key!r}.")
    return cls(**{key: _coerce(hints[key], value, f"{where}.{key}" if where else key) for key, value in data.items()})


def check_types(config: object, where: str) -> None:
    """Refuse a field of a dataclass whose value is of another type than it states; errors name it after ``where``."""
    hints = typing.get_type_hints(type(config))
    for f in dataclasses.fields(config):  # type: ignore[arg-type]  # a dataclass
        _coerce(hints[f.name], getattr(config, f.name), f"{where}.{f.name}")


def _coerce(hint: Any, value: object, where: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    several: list[Any] = [o for o in options if dataclasses.is_dataclass(o)]
    if isinstance(hint, type) and issubclass(hint, OpenJson) and not several:
        several = hint.kinds(value.get("kind") if isinstance(value, dict) else None)
    plain = [o for o in options if o is not type(None)]
    fitting = [o for o in plain if type(value) is (typing.get_origin(o) or o)]  # "learned" or {"name": "learned"}
    hint = _of_kind(several, value, where) if len(several) > 1 else (fitting or plain)[0]
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, where=where)
    origin = typing.get_origin(hint) or hint
    if origin is tuple and isinstance(value, (list, tuple)):
        inner = next(iter(typing.get_args(hint)), None)
        for i, each in enumerate(value) if inner in (int, float, str) else ():
            _coerce(inner, each, f"{where}.{i}")
        return tuple(_to_tuples(v) for v in value)
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value) if abs(value) < 1 << 1023 else value  # what is larger is refused below
    if origin in (int, float, str, bool) and type(value) is not origin:
        optional = " or null" if type(None) in options else ""
        optional = " or an object" * any(typing.get_origin(o) is dict for o in plain) + optional
        raise MixerError(
            f"config: {where} must be {'an' if origin is int else 'a'} {origin.__name__}{optional}, got {value!r}."
        )
    if origin is float and value != value:
        raise MixerError(f"config: {where} must be a number{' or null' if type(None) in options else ''}, got {value}.")
    if origin is tuple:
        raise MixerError(f"config: {where} must be a list, written like [1, 2], got {value!r}.")
    return value


def _kind(cls: type) -> dict[str, str]:
    return {"kind": cls.kind} if issubclass(cls, Json) and hasattr(cls, "kind") else {}


def _of_kind(classes: list[Any], value: object, where: str) -> type:
    """Return the class whose ``kind`` the value names, or the first if it names none."""
    kinds: dict[str, type] = {c.kind: c for c in classes}
    kind = value.get("kind", next(iter(kinds))) if isinstance(value, dict) else next(iter(kinds))
    if not isinstance(kind, str) or kind not in kinds:
        raise MixerError(f"config: {where}.kind={kind!r} is unknown; {nearest(str(kind), kinds)}.")
    return kinds[kind]


def _to_tuples(value: object) -> object:
    return tuple(_to_tuples(v) for v in value) if isinstance(value, list) else value


def without_removed(config: object, dotted: Record) -> Record:
    """Return recorded values by dotted name without those of fields that were removed since, at their old default."""
    return {name: value for name, value in dotted.items() if not _is_removed(config, name.split("."), value)}


def _is_removed(config: object, names: list[str], value: object) -> bool:
    for name in names[:-1]:
        config = getattr(config, name, None)
    former = removed_fields(type(config))
    return names[-1] in former and former[names[-1]] == value


def dotted_fields(data: Record, prefix: str = "") -> Record:
    """Return every field of a config's JSON with its value, by its dotted name."""
    found: Record = {}
    for key, value in data.items():
        found |= dotted_fields(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found
