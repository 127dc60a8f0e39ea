"""Implement ``tokenmix check``: find the class, check its promises and print one line for each."""

from __future__ import annotations

import json as json_text
import sys
from typing import Any

from torch import nn

from ..errors import MixerError
from ..mixers import MIXERS, mixer_options, required_options
from ..system.config import nearest
from ..types import Options
from .device import on_device
from .loading import load_named, load_reference, one_line, place_of
from .plain import must_be_module
from .report import KEPT, REFUSED, PromiseReport
from .subject import Subject, is_mixer
from .suite import find_subject, run_promises

DIM = 16


def main_check(
    target: str,
    options: Options,
    json: bool = False,
    reference: str | None = None,
    verbose: bool = False,
    device: str = "cpu",
) -> int:
    """Check ``package:Class``, ``file.py:Class`` or a row of ``MIXERS``, built with ``options``; print the report.

    ``hf:FOLDER`` and ``timm:NAME`` are whole models (``check_model``); those without weights get random ones, which the
    report says, and ``options`` then replace fields of their config, or arguments of ``timm.create_model``.

    ``options`` may hold ``dim`` (default 16), ``grid`` and ``prefix`` besides the mixer's own. Where they do not say
    ``causal`` and the mixer supports both forms, both are checked, and one that its constructor refuses is named.

    Args:
        json: print the reports as JSON, and nothing else.
        reference: ``package:function`` or ``file.py:function``, the equation in float64 as ``check_mixer`` takes it.
        verbose: print every input that breaks a promise, and tracebacks.
        device: where the layer runs, such as "cuda"; what it computes is still compared with the equation in float64.

    Returns:
        0 if every promise is kept, 1 if one is broken.

    Raises:
        MixerError: the class or the reference cannot be imported, or the class cannot be built.
    """
    with on_device(device):
        if target.startswith(("hf:", "timm:")):
            return _check_whole(target, dict(options), json, reference, verbose)
        return _check_forms(target, dict(options), json, reference, verbose)


def _check_forms(target: str, given: Options, json: bool, reference: str | None, verbose: bool) -> int:
    """Check all forms of a target, print what was found, and return the exit code."""
    cls = _find_target(target)
    equation = None if reference is None else load_reference(reference)
    _check_options(target, given)
    dim = given.pop("dim", DIM) if is_mixer(cls) else given.get("dim", DIM)
    place = _place(target, given) if is_mixer(cls) else {}
    subjects = [find_subject(cls, form, dim=dim, seed=0, reference=equation, **place) for form in _forms(cls, given)]
    subjects, refused = _buildable(subjects)
    reports = []
    for s in subjects:
        reports.append(run_promises(s))
        if not json:
            _print(reports[-1], verbose)
    if json:
        print(json_text.dumps([r.as_dict() for r in reports], indent=1))
    if refused:
        refused += "" if given else " A class that has only a causal form states facts = Facts(causal_only=True)."
        print(f"not checked: {refused}", file=sys.stderr if json else sys.stdout)
    return 1 if any(r.failures for r in reports) else 0


def _check_whole(target: str, options: Options, json: bool, reference: str | None, verbose: bool) -> int:
    """Check a whole model, print the report, and return the exit code."""
    from .model_subject import model_subject
    from .models import open_model, run_model_promises

    if reference is not None:
        raise MixerError(f"check: --reference is for layers; {target} is a whole model.")
    model, drawn = open_model(target, options)
    report = run_model_promises(model_subject(model, perturb=drawn, title=target))
    if json:
        print(json_text.dumps([report.as_dict()], indent=1))
    else:
        _print(report, verbose)
    return 1 if report.failures else 0


def _forms(cls: type[nn.Module], options: Options) -> list[Options]:
    """Return the options as given, or with each causal form of the class where they leave that open."""
    if not is_mixer(cls) or "causal" in options:
        return [options]
    forms = cls.facts.causal_forms()  # type: ignore[attr-defined]  # a Mixer, as just asked
    return [options if forms == (False,) else {**options, "causal": causal} for causal in forms]


def _buildable(subjects: list[Subject]) -> tuple[list[Subject], str]:
    """Return the forms that can be built, and why the other one cannot; raise the first reason if none can."""
    built, reasons = [], []
    for s in subjects:
        try:
            _must_build(s)
            built.append(s)
        except MixerError as error:
            if not isinstance(error.__cause__, MixerError):
                raise
            reasons.append(error)
    if not built:
        raise reasons[0]
    return built, "; ".join(str(r).removeprefix("check: ") for r in reasons)


def _find_target(target: str) -> type[nn.Module]:
    if ":" in target:
        return must_be_module(load_named(target))
    if target not in MIXERS:
        raise MixerError(
            f"check: no mixer is called {target!r}; {nearest(target, MIXERS)}; "
            "`tokenmix list` shows all mixers; write a class of your own as package:Class or file.py:Class."
        )
    return MIXERS[target]


def _place(target: str, given: Options) -> Options:
    """Take ``grid`` and ``prefix`` out of the options."""
    grid, prefix = given.pop("grid", None), given.pop("prefix", 0)
    if grid is not None and not (isinstance(grid, list) and grid and all(type(n) is int and n > 0 for n in grid)):
        raise MixerError(f"check: {target}: grid is a list of positive sizes such as [4, 5], got {grid!r}.")
    if type(prefix) is not int or prefix < 0:
        raise MixerError(f"check: {target}: prefix is the number of tokens before the grid, got {prefix!r}.")
    return {"grid": tuple(grid) if grid else None, "prefix": prefix}


def _check_options(target: str, given: Options) -> None:
    """Refuse options that a row of ``MIXERS`` does not have, and ask for those it requires."""
    if target not in MIXERS:
        return
    known = mixer_options(MIXERS[target])
    for option in given:
        if option not in (*known, "dim", "grid", "prefix"):
            raise MixerError(f"check: cannot build {target}: it has no option {option!r}; {nearest(option, known)}.")
    needed = required_options(MIXERS[target], given)
    if needed:
        missing = f"option{'s' * (len(needed) > 1)} {', '.join(needed)}"
        raise MixerError(f"check: cannot build {target}: it needs the {missing}; give them with --options.")


def _must_build(s: Subject) -> None:
    try:
        built: Any = s.build()
    except Exception as error:
        kind, place = ("", "") if isinstance(error, MixerError) else (f"{type(error).__name__}: ", place_of(error))
        raise MixerError(f"check: cannot build {s.title}: {kind}{one_line(error)}{place}") from error
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
            raise MixerError(f'check: {one_line(error)} Give one in --options, such as "grid": [4, 5].') from error


def _print(report: PromiseReport, verbose: bool) -> None:
    print(report.text(verbose=verbose))
    failed, kept = len(report.failures), sum(r.status == KEPT for r in report.results)
    refused = sum(r.status == REFUSED for r in report.results)
    said = f"{kept} kept, {failed} broken, " + (f"{refused} refused, " if refused else "")
    print(f"{said}{len(report.results) - kept - failed - refused} not applicable or waived\n")
