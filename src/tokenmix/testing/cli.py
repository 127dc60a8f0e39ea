"""Implement ``tokenmix check``: find the class, check its promises and print one line for each."""

from __future__ import annotations

import importlib
import inspect
import json as json_text
from typing import Any

from torch import nn

from ..errors import MixerError
from ..mixers import MIXERS, mixer_options
from ..system.config import nearest
from ..system.modules import here_on_path
from .plain import must_be_module
from .report import Report
from .subject import Subject, is_mixer
from .suite import find_subject, run_promises

DIM = 16


def main_check(target: str, options: dict[str, Any], json: bool = False) -> int:
    """Check ``package:Class``, or a row of ``MIXERS``, built with ``options`` and print the report.

    ``options`` may hold ``dim`` (default 16), ``grid`` and ``prefix`` besides the mixer's own. Where they do not say
    ``causal`` and the mixer supports both forms, both are checked.

    Returns:
        0 if every promise is kept, 1 if one is broken.

    Raises:
        MixerError: the class cannot be imported or built.
    """
    given = dict(options)
    cls = _found(target)
    _check_options(target, given)
    dim = given.pop("dim", DIM) if is_mixer(cls) else given.get("dim", DIM)
    place = _place(target, given) if is_mixer(cls) else {}
    reports = []
    for form in _forms(cls, given):
        s = find_subject(cls, form, dim=dim, seed=0, **place)
        _must_build(s)
        reports.append(run_promises(s))
        if not json:
            _print(reports[-1])
    if json:
        print(json_text.dumps([r.as_dict() for r in reports], indent=1))
    return 1 if any(r.failures for r in reports) else 0


def _forms(cls: type[nn.Module], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the options as given, or both causal forms where the options leave that open and the class has both."""
    if not is_mixer(cls) or "causal" in options or not cls.supports_causal:  # type: ignore[attr-defined]  # a Mixer, as just asked
        return [options]
    return [{**options, "causal": causal} for causal in (False, True)]


def _found(target: str) -> type[nn.Module]:
    if ":" not in target:
        if target not in MIXERS:
            raise MixerError(
                f"check: no mixer is called {target!r}; {nearest(target, MIXERS)}; "
                "`tokenmix list` shows all mixers; write a class of your own as package:Class."
            )
        return MIXERS[target]
    package, _, name = target.partition(":")
    with here_on_path():
        try:
            module = importlib.import_module(package)
        except Exception as error:
            raise MixerError(f"check: cannot import {package!r}: {type(error).__name__}: {_line(error)}") from error
    if not hasattr(module, name):
        raise MixerError(f"check: {package} has no {name!r}.")
    return must_be_module(getattr(module, name))


def _place(target: str, given: dict[str, Any]) -> dict[str, Any]:
    """Take ``grid`` and ``prefix`` out of the options."""
    grid, prefix = given.pop("grid", None), given.pop("prefix", 0)
    if grid is not None and not (isinstance(grid, list) and grid and all(type(n) is int and n > 0 for n in grid)):
        raise MixerError(f"check: {target}: grid is a list of positive sizes such as [4, 5], got {grid!r}.")
    if type(prefix) is not int or prefix < 0:
        raise MixerError(f"check: {target}: prefix is the number of tokens before the grid, got {prefix!r}.")
    return {"grid": tuple(grid) if grid else None, "prefix": prefix}


def _check_options(target: str, given: dict[str, Any]) -> None:
    """Refuse options that a row of ``MIXERS`` does not have, and ask for those it requires."""
    if target not in MIXERS:
        return
    known = mixer_options(MIXERS[target])
    for option in given:
        if option not in (*known, "dim", "grid", "prefix"):
            raise MixerError(f"check: cannot build {target}: it has no option {option!r}; {nearest(option, known)}.")
    needed = [option for option, default in known.items() if default is inspect.Parameter.empty and option not in given]
    if needed:
        missing = f"option{'s' * (len(needed) > 1)} {', '.join(needed)}"
        raise MixerError(f"check: cannot build {target}: it needs the {missing}; give them with --options.")


def _must_build(s: Subject) -> None:
    try:
        built: Any = s.build()
    except Exception as error:
        kind = "" if isinstance(error, MixerError) else f"{type(error).__name__}: "
        raise MixerError(f"check: cannot build {s.title}: {kind}{_line(error)}") from error
    if not is_mixer(s.cls):
        return
    if s.grid is not None and not built.capabilities.grid:
        raise MixerError(
            f"check: {s.title}: mixes sequences as built and takes no grid; leave grid and prefix out of --options."
        )
    if s.grid is None and built.capabilities.grid:
        try:
            s.call(built, s.x())
        except MixerError as error:
            raise MixerError(f'check: {_line(error)} Give one in --options, such as "grid": [4, 5].') from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _print(report: Report) -> None:
    print(report)
    failed, kept = len(report.failures), sum(r.status == "kept" for r in report.results)
    print(f"{kept} kept, {failed} broken, {len(report.results) - kept - failed} not applicable or waived\n")
