"""How bugs are planted while the program runs, and what must notice them.

A bug replaces a method, a function or a kernel of the library by one that is wrong. Before it is planted, each promise
or test that must notice it holds; afterwards each fails by comparison: a crash does not count.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import foreign_mixers
from cases import CASES, subject_of
from tokenmix import MIXERS, use_backend
from tokenmix.kernels.operator import OPERATORS
from tokenmix.testing import Subject, run_promises
from tokenmix.testing.suite import find_subject

Plant = Callable[[pytest.MonkeyPatch, Any], None]
"""What plants a bug, given the class of the mixer under test."""
Wrong = Callable[..., Any]
"""What replaces a function: called with the right one and its arguments."""


class Bug(NamedTuple):
    """A bug and what must notice it: promises on a case, or another test with the arguments ``given``.

    Args:
        case: a row of ``CASES``, or a class of ``foreign_mixers``.
        subject: builds the subject of a case; ``subject32`` takes float32, which the kernels serve.
    """

    name: str
    plant: Plant
    promises: tuple[str, ...] = ()
    case: str = ""
    causal: bool = False
    subject: Callable[[str, bool], Subject] = subject_of
    backend: str = "auto"
    test: Callable[..., None] | None = None
    given: dict[str, Any] = {}

    @property
    def mixer(self) -> Any:
        """The class under test; None where a test has its own."""
        return MIXERS[CASES[self.case][0]] if self.case in CASES else getattr(foreign_mixers, self.case or "None", None)

    def outcomes(self) -> dict[str, str]:
        """Say of each promise, or of the test, whether it is kept or broken."""
        torch.manual_seed(0)
        if self.test:
            return {self.test.__name__: outcome(self.test, self.given)}
        if self.case in CASES:
            s = self.subject(self.case, self.causal)
        else:
            s = find_subject(self.mixer, {"causal": self.causal}, dim=8, seed=0)
        with use_backend(self.backend):
            return {r.promise: r.status for r in run_promises(s, self.promises).results}


def name_of(bug: Bug) -> str:
    return bug.name.replace(" ", "-")


def check(bug: Bug, patch: pytest.MonkeyPatch) -> None:
    """Check that all that must notice a bug holds before it is planted, and fails by comparison afterwards."""
    assert set(bug.outcomes().values()) == {"kept"}
    bug.plant(patch, bug.mixer)
    found = bug.outcomes()
    assert found == dict.fromkeys(found, "broken")


def outcome(test: Callable[..., None], given: dict[str, Any]) -> str:
    try:
        test(**given)
    except AssertionError:
        return "broken"
    return "kept"


def replace(patch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Wrong) -> None:
    """Let ``wrong(right, ...)`` answer the calls of a function of a module or of a method of a class."""
    patch.setattr(owner, name, wrapped(getattr(owner, name), wrong))


def wrapped(right: Callable[..., Any], wrong: Wrong) -> Callable[..., Any]:
    @functools.wraps(right)  # which argument is which goes by its name
    def instead(*given: Any, **options: Any) -> Any:
        return wrong(right, *given, **options)

    return instead


def method(name: str, wrong: Wrong) -> Plant:
    """Replace a method of the mixer."""
    return lambda patch, cls: replace(patch, cls, name, wrong)


def function(module: str, name: str, wrong: Wrong) -> Plant:
    """Replace a function where a module looks it up."""
    return lambda patch, cls: replace(patch, importlib.import_module(module), name, wrong)


def fact(name: str, value: Any) -> Plant:
    """Replace a fact of the mixer's class."""
    return lambda patch, cls: patch.setattr(cls, "facts", dataclasses.replace(cls.facts, **{name: value}))


def form(wrong: Wrong) -> Plant:
    """Replace the mixer's functional form."""

    def plant(patch: pytest.MonkeyPatch, cls: Any) -> None:
        instead = wrapped(cls.facts.functional_form(), wrong)
        fact("form", instead)(patch, cls)

    return plant


def outputs(change: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """Replace the outputs y of x by ``change(y, x)``; states stay what they are."""

    def wrong(right: Any, mixer: Any, x: Tensor, *given: Any, **options: Any) -> Any:
        y = right(mixer, x, *given, **options)
        return change(y, x) if isinstance(y, Tensor) else y

    return method("forward", wrong)


def new_states(change: Callable[[Any, Any, Tensor], Any]) -> Plant:
    """Replace the state after a chunk x by ``change(state before, state after, x)``."""

    def wrong(right: Any, mixer: Any, x: Tensor, state: Any, **options: Any) -> Any:
        y, after = right(mixer, x, state, **options)
        return y, change(state, after, x)

    return method("extend", wrong)


class Kernel(NamedTuple):
    """Replaces "forward", "backward" or another function of a C kernel."""

    name: str
    part: str
    wrong: Wrong

    def __call__(self, patch: pytest.MonkeyPatch, cls: Any) -> None:
        replace(patch, OPERATORS[self.name].module("cpu"), self.part, self.wrong)


def result(change: Callable[[Any], Any], at: int | None = None) -> Wrong:
    """Return what replaces a function by one whose result, or one tensor of it, is changed."""

    def wrong(right: Any, *given: Any, **options: Any) -> Any:
        found = right(*given, **options)
        return change(found) if at is None else (*found[:at], change(found[at]), *found[at + 1 :])

    return wrong
