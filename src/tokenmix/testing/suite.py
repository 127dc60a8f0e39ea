"""The table of promises and the one call that checks them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from ..errors import MixerError
from ..mixers import MIXERS
from ..types import Options
from . import (
    batching,
    defaults,
    elsewhere,
    equality,
    masking,
    nonfinite,
    option_promises,
    plain,
    recompute,
    refusals,
    segments,
    streaming,
    tracing,
    transforms,
)
from .crash import is_refusal, own_line
from .report import (
    BROKEN,
    CRASHED,
    KEPT,
    NOT_APPLICABLE,
    REFUSED,
    WAIVED,
    Broken,
    ContractError,
    NotApplicable,
    PromiseReport,
    Result,
    collect_failures,
    fail,
)
from .subject import Subject, is_mixer, subject

Promise = Callable[[Subject], None]


class Seeded(Protocol):
    """What any subject has."""

    @property
    def seed(self) -> int:
        """The number that its inputs follow from."""


Checked = TypeVar("Checked", bound=Seeded)


def declares_waivers(s: Subject) -> None:
    """Each waiver names a promise and a reason, and none waives causality or masking."""
    for name, reason in _class_waivers(s).items():
        if name in NEVER_WAIVED:
            fail(f"waives {name}, which no mixer may waive")
        if name not in PROMISES or not reason:
            fail(f"waives {name!r} for the reason {reason!r}; a waiver needs a promise's name and a reason")


def _class_waivers(s: Subject) -> dict[str, str]:
    """Return the waivers of the class: in its facts, or in an attribute of a layer that is no mixer."""
    return s.cls.facts.waivers if is_mixer(s.cls) else getattr(s.cls, "waivers", {})  # type: ignore[attr-defined]  # a Mixer


def _table(*functions: Promise) -> dict[str, Promise]:
    return {f.__name__: f for f in functions}


PROMISES: dict[str, Promise] = _table(
    refusals.options_are_json,
    option_promises.refuses_wrong_options,
    declares_waivers,
    batching.keeps_shape,
    equality.equals_reference,
    equality.accurate_on_adversarial_keys,
    equality.finite_at_large_keys,
    equality.nothing_to_attend,
    equality.pairs_with_nothing_to_attend,
    equality.every_parameter_learns,
    equality.differentiable_twice,
    masking.future_cannot_reach_past,
    masking.past_reaches_present,
    masking.token_before_reaches,
    masking.masked_keys_have_no_influence,
    masking.padded_equals_shorter,
    masking.subset_equals_masked,
    masking.attn_mask_equals_causal,
    nonfinite.non_finite_is_honest,
    nonfinite.gradients_of_non_finite_are_honest,
    batching.rows_are_independent,
    batching.empty_batch,
    batching.one_token,
    batching.any_strides,
    batching.packed_equals_separate,
    streaming.streaming_equals_parallel,
    streaming.gradients_stream,
    streaming.rows_at_different_positions,
    streaming.state_is_a_value,
    streaming.states_take_other_floats,
    streaming.reorder_picks_rows,
    streaming.state_bytes_counts,
    streaming.merge_joins_stretches,
    segments.segments_compose,
    segments.gradients_of_segments,
    streaming.context_streams,
    streaming.context_of_itself,
    transforms.compiles,
    transforms.exports,
    transforms.exports_to_onnx,
    tracing.right_or_refused_when_traced,
    transforms.copies,
    transforms.state_dict_round_trip,
    transforms.changes_dtype,
    transforms.builds_on_meta,
    transforms.runs_under_autocast,
    defaults.same_under_another_default_dtype,
    defaults.same_under_another_default_device,
    recompute.checkpointing_changes_nothing,
    refusals.refuses_what_it_cannot,
    refusals.refuses_wrong_inputs,
    refusals.refuses_foreign_states,
    elsewhere.hooks_see_every_call,
    elsewhere.refuses_other_devices,
)
"""Every promise of the contract, in the order of checking. The docstring of each states the promise."""

PLAIN_PROMISES: dict[str, Promise] = _table(
    batching.keeps_shape,
    plain.any_length,
    plain.same_twice,
    equality.equals_reference,
    equality.finite_at_large_inputs,
    equality.every_parameter_learns,
    equality.differentiable_twice,
    masking.future_cannot_reach_past,
    masking.past_reaches_present,
    plain.mask_hides_padding,
    batching.rows_are_independent,
    batching.empty_batch,
    batching.one_token,
    batching.any_strides,
    transforms.compiles,
    transforms.copies,
    transforms.state_dict_round_trip,
    transforms.changes_dtype,
    transforms.runs_under_autocast,
)
"""The promises that can be checked on any ``nn.Module`` on (B, T, D)."""

_WHO_SEES_WHOM = (
    masking.future_cannot_reach_past,
    masking.masked_keys_have_no_influence,
    masking.padded_equals_shorter,
    masking.attn_mask_equals_causal,
)
NEVER_WAIVED = frozenset(_table(*_WHO_SEES_WHOM, equality.nothing_to_attend, equality.pairs_with_nothing_to_attend))
"""Causality and masking: the promises that no mixer may waive."""


def check_mixer(
    target: str | type[nn.Module],
    options: Options | None = None,
    *,
    dim: int = 8,
    reference: Callable[..., Tensor] | None = None,
    functional: Callable[..., Tensor] | None = None,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    promises: Iterable[str] | None = None,
    seed: int = 0,
    compile_backend: str = "aot_eager",
) -> PromiseReport:
    """Check every promise of the contract on a mixer built with these options.

    Call it once per form you use, causal and not.

    Args:
        target: a ``Mixer``, the name of a row of ``MIXERS``, or any ``nn.Module`` on (B, T, D), for which only
            ``PLAIN_PROMISES`` are checked.
        options: what it is built with, besides dim.
        reference: the equation in float64. Where the mixer has ``functional_args``: f(*args, mask=(B, T, S) bool or
            None, **structural options), before ``out_proj``. Otherwise f(mixer, x, allowed (B, T, S) bool) -> the whole
            output. A row of the library has its own.
        functional: the function beneath a mixer with ``functional_args``; some promises are measured on it.
        grid: (H, W) or (D, H, W), for mixers on grids, after ``prefix`` tokens.
        promises: names, to check only those.
        compile_backend: the backend of ``torch.compile``; "inductor" generates code.

    Raises:
        ContractError: with the report and the offending inputs, if any promise is broken.
    """
    more = {
        "reference": reference,
        "functional": functional,
        "grid": grid,
        "prefix": prefix,
        "compile_backend": compile_backend,
    }
    report = run_promises(find_subject(target, options, dim=dim, seed=seed, **more), promises)
    if report.failures:
        raise ContractError(report)
    return report


def find_subject(
    target: str | type[nn.Module], options: Options | None, *, dim: int, seed: int, **more: Any
) -> Subject:
    """Build the Subject of a target, a PlainSubject where it is no Mixer."""
    if isinstance(target, str) and target not in MIXERS:
        own = "write a class of your own as package:Class"
        raise MixerError(f"check: no mixer is called {target!r}; known: {', '.join(MIXERS)}; {own}.")
    if not isinstance(target, str) and not is_mixer(plain.must_be_module(target)):
        return plain.plain_subject(target, dict(options or {}), dim=dim, seed=seed, **more)
    return subject(target, options, dim=dim, seed=seed, **more)


def run_promises(s: Subject, names: Iterable[str] | None = None) -> PromiseReport:
    """Check the named promises, or all, and return the report; broken promises do not raise."""
    table = PROMISES if is_mixer(s.cls) else PLAIN_PROMISES
    chosen = list(table) if names is None else list(names)
    for name in chosen:
        if name not in table:
            raise MixerError(f"check: no promise is called {name!r}; known: {', '.join(table)}.")
    return PromiseReport(s.title, [run_promise(s, name, table[name]) for name in chosen])


def _waivers_of(s: Subject, name: str) -> dict[str, str]:
    """Return the waivers of the mixer as built; it is built only if its class waives ``name``."""
    declared = _class_waivers(s)
    return s.raw().waived() if name in declared else declared


def run_promise(s: Subject, name: str, promise: Promise) -> Result:
    """Check one promise: kept, broken by comparison, crashed, waived or not applicable.

    All of its comparisons run, and the result holds each that failed.
    """
    waived = _waivers_of(s, name)
    if name in waived and name not in NEVER_WAIVED:
        return Result(name, WAIVED, waived[name])
    return try_promise(s, name, promise, library=s.cls.__module__.startswith("tokenmix."))


def try_promise(
    s: Checked, name: str, promise: Callable[[Checked], None], *, library: bool = False, refusals: bool = False
) -> Result:
    """Run all comparisons of one promise on a subject and return what was found.

    Args:
        library: whether the code under test is part of this library.
        refusals: whether an error that the code under test raises itself is a refusal, and not a failure.
    """
    found: list[str] = []
    try:
        with collect_failures(found):
            promise(s)
    except NotApplicable as why:
        if not found:
            return Result(name, NOT_APPLICABLE, str(why))
    except Broken as why:
        found.append(str(why))
    except Exception as error:
        said = f"{type(error).__name__}: {str(error).strip()[:400]}"
        if refusals and is_refusal(error) and not found:
            return Result(name, REFUSED, said)
        said += f" [seed={s.seed}]"
        raised = {
            "where": own_line(error, library=library),
            "trace": "".join(traceback.format_exception(error)),
        }
        if not found:
            return Result(name, CRASHED, said, (), **raised)
        return Result(name, BROKEN, found[0], (*found[1:], f"raised {said}"), **raised)
    return Result(name, BROKEN, found[0], tuple(found[1:])) if found else Result(name, KEPT)
