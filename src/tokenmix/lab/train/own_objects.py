"""Objects of the user's own in a run: their names, the fingerprints of their code, their state as tensors and JSON."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...system.modules import import_named

PLAIN = (int, float, str, bool, type(None))


def name_of(given: object) -> str | None:
    """Return "module:name" of an object that another process can import; None of a lambda or a local object."""
    name, module = getattr(given, "__qualname__", None), getattr(given, "__module__", None)
    if name is None:
        homes = [home for home in ("__main__", type(given).__module__) if home in sys.modules]
        found = ((home, key) for home in homes for key, value in vars(sys.modules[home]).items() if value is given)
        module, name = next(found, (None, None))
    if not module or not name or "<" in name:
        return None
    if module == "__main__":
        file = getattr(sys.modules[module], "__file__", None)
        module = None if file is None else Path(file).stem
    return f"{module}:{name}" if module else None


def import_object(name: str, who: str, what: str) -> Any:
    """Return the object of a name "module:name", where the module may be imported (``system.modules``)."""
    module, _, path = name.partition(":")
    found: Any = import_named(module, who, what)
    for part in path.split("."):
        if not hasattr(found, part):
            raise MixerError(f"{who}: {module} has no {path!r}, which {what} names; define it at the top of its file.")
        found = getattr(found, part)
    return found


def fingerprint(given: object) -> str:
    """Return a digest of an object's code: of its function or class, without comments, with the values that it uses.

    Data that an object holds do not count, but for tensors' shapes of a module and plain values of a closure.
    """
    return hashlib.sha256("\n".join(_describe(given)).encode()).hexdigest()[:16]


def digest(batch: object) -> str:
    """Return a digest of the numbers of a batch."""
    found = hashlib.sha256()
    pieces: list[Any] = [batch]
    while pieces:
        piece = pieces.pop()
        if isinstance(piece, Tensor):
            found.update(f"{piece.dtype}{tuple(piece.shape)}".encode())
            found.update(piece.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(piece, dict):
            pieces += piece.values()
        elif isinstance(piece, (tuple, list)):
            pieces += piece
        else:
            found.update(repr(piece).encode())
    return found.hexdigest()[:16]


def _describe(given: Any) -> list[str]:
    if isinstance(given, functools.partial):
        options = [repr(value) for value in (*given.args, *sorted(given.keywords.items())) if _is_plain(value)]
        return [*_describe(given.func), *options]
    if inspect.ismethod(given):
        return [given.__name__, *_describe(given.__self__)]
    if inspect.isfunction(given):
        used = inspect.getclosurevars(given)
        values = {**used.nonlocals, **used.globals}
        return [_source(given), *(f"{name}={values[name]!r}" for name in sorted(values) if _is_plain(values[name]))]
    if inspect.isclass(given) or inspect.isbuiltin(given):
        return [_source(given)]
    shapes = [f"{k}{tuple(v.shape)}" for k, v in given.state_dict().items()] if isinstance(given, nn.Module) else []
    return [_source(type(given)), *shapes]


def _is_plain(value: object) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _source(given: Any) -> str:
    """Return the code of a function or class, without comments; of one without source, its name."""
    try:
        text = textwrap.dedent(inspect.getsource(given))
    except (OSError, TypeError):
        return f"{given.__module__}:{given.__qualname__}"
    try:
        return ast.unparse(ast.parse(text))
    except SyntaxError:  # a lambda in the middle of a call
        return text.strip()


def pack_state(state: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Return a state as JSON, whose tensors are put into ``tensors`` under names that begin with ``where``.

    Raises:
        MixerError: for anything that is neither a tensor nor JSON, with the place where it stands.
    """
    if isinstance(state, Tensor):
        tensors[where] = state.detach().cpu().clone()
        return {"tensor": where}
    if isinstance(state, PLAIN):
        return state
    if isinstance(state, dict):
        pairs = [(key, pack_state(value, tensors, f"{where}.{key}")) for key, value in state.items()]
        if all(isinstance(key, (int, str)) for key in state):
            return {"dict": [list(pair) for pair in pairs]}
    if isinstance(state, (list, tuple)):
        return {type(state).__name__: [pack_state(each, tensors, f"{where}.{i}") for i, each in enumerate(state)]}
    raise MixerError(
        f"train: the state_dict of {where} holds a {type(state).__name__}; a checkpoint takes tensors and JSON, so "
        "that a resumed run goes on exactly."
    )


def unpack_state(packed: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the state of which ``pack_state`` made this JSON and these tensors."""
    if not isinstance(packed, dict):
        return packed
    ((kind, held),) = packed.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {key: unpack_state(value, tensors) for key, value in held}
    found = [unpack_state(value, tensors) for value in held]
    return tuple(found) if kind == "tuple" else found
