"""Promises on refusals: missing capabilities and inputs of the wrong shape or dtype raise one clear MixerError."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MixerError
from ..mixers import Mixer, mixer_options
from . import inputs
from .report import NotApplicable, fail
from .subject import Subject


def expect_refusal(s: Subject, what: str, call: Callable[[], object], *, word: str = "") -> None:
    """Fail unless ``call`` raises MixerError in one line that names the mixer (and holds ``word``)."""
    try:
        call()
    except MixerError as error:
        text = str(error)
        if s.cls.__name__ not in text or "\n" in text or word not in text:
            named = s.cls.__name__ + (f" and {word}" if word else "")
            fail(f"{what}: the error should be one line naming {named}, got {text!r}")
        return
    except Exception as error:
        fail(f"{what}: raises {type(error).__name__} ({str(error)[:80]}) instead of MixerError")
    fail(f"{what}: is accepted silently")


def options_are_json(s: Subject) -> None:
    """Options are keyword-only and JSON, so that a spec can be written to a file."""
    try:
        json.dumps(s.options)
    except TypeError as error:
        fail(f"options are not JSON: {error}")
    first, *rest = list(inspect.signature(s.cls.__init__).parameters.values())[1:]
    if first.name != "dim":
        fail(f"the first argument is {first.name}, not dim")
    loose = [p.name for p in rest if p.kind is not p.KEYWORD_ONLY]
    if loose:
        fail(f"options are not keyword-only: {', '.join(loose)}")


def refuses_what_it_cannot(s: Subject) -> None:
    """Declared capabilities work, and each missing one raises MixerError."""
    mixer, x = s.build(), s.x()
    T, can = s.length, mixer.capabilities
    context, lower = s.x(length=s.context_length(mixer), stream=1), torch.ones(T, T, dtype=torch.bool).tril()
    calls: dict[str, tuple[bool, Callable[[], object]]] = {
        "context": (can.context, lambda: s.call(mixer, x, context)),
        "attn_mask": (can.attn_mask, lambda: s.call(mixer, x, attn_mask=lower)),
        "init_state": (can.streaming, lambda: mixer.init_state(2)),
        "extend": (can.streaming, lambda: mixer.extend(x, mixer.init_state(2))),
        "init_state over a context": (mixer.capabilities.keeps_context, lambda: mixer.init_state(2, context=context)),
    }
    if not can.grid:
        calls["grid"] = (False, lambda: mixer(x, grid=(2, T // 2)))
    for name, (declared, call) in calls.items():
        if declared:
            call()
        else:
            expect_refusal(s, f"{name}, which capabilities do not declare", call)
    if can.grid and s.grid is None:
        s.call(mixer, x, grid=(T,))
    if not s.cls.facts.causal:  # type: ignore[attr-defined]  # only a Mixer has capabilities
        expect_refusal(s, "causal=True", lambda: s.raw(causal=True))
    elif can.causal is not (asked := s.options.get("causal", mixer_options(s.cls).get("causal", False))):
        fail(f"capabilities.causal is {can.causal} for causal={asked}")
    if s.cls.facts.causal_only:  # type: ignore[attr-defined]  # as above
        expect_refusal(s, "causal=False, which causal_only excludes", lambda: s.raw(causal=False))
    if not can.grid:
        expect_refusal(s, "prefix without a grid", lambda: mixer(x, prefix=1))


def refuses_wrong_inputs(s: Subject) -> None:
    """Inputs, masks, positions, grids and states of the wrong shape or dtype raise one clear error."""
    mixer, x, T = s.build(), s.x(), s.length
    ones = torch.ones(2, T, dtype=torch.bool)
    place = torch.arange(T).expand(2, T)
    calls: dict[str, Callable[[], object]] = {
        "x of another width": lambda: s.call(mixer, s.x()[..., :-1]),
        "x without a batch": lambda: s.call(mixer, x[0]),
        "x of integers": lambda: s.call(mixer, x.long()),
        "key_mask of floats": lambda: s.call(mixer, x, key_mask=ones.double()),
        "key_mask of integers": lambda: s.call(mixer, x, key_mask=ones.long()),
        "key_mask too short": lambda: s.call(mixer, x, key_mask=ones[:, 1:]),
        "key_mask of one row": lambda: s.call(mixer, x, key_mask=ones[:1]),
        "key_mask of one dimension": lambda: s.call(mixer, x, key_mask=ones[0]),
        "positions of floats": lambda: s.call(mixer, x, positions=place.double()),
        "positions too short": lambda: s.call(mixer, x, positions=place[:, 1:]),
        "positions of one dimension": lambda: s.call(mixer, x, positions=place[0]),
        "packed x with a batch": lambda: mixer.forward_packed(x, torch.tensor([0, T], dtype=torch.int32)),
        "cu_seqlens of int64": lambda: mixer.forward_packed(x[0], torch.tensor([0, T])),
        "cu_seqlens that ends early": lambda: mixer.forward_packed(x[0], torch.tensor([0, T - 1], dtype=torch.int32)),
        "cu_seqlens that falls": lambda: mixer.forward_packed(x[0], torch.tensor([0, 3, 2, T], dtype=torch.int32)),
    }
    calls |= _wrong_by_capability(s, mixer)
    for what, call in calls.items():
        expect_refusal(s, what, call)


def _wrong_by_capability(s: Subject, mixer: Mixer) -> dict[str, Callable[[], object]]:
    x, T, can = s.x(), s.length, mixer.capabilities
    calls: dict[str, Callable[[], object]] = {}
    if mixer.max_len is not None:
        n = mixer.max_len
        far = torch.arange(T).expand(2, T).clone()
        far[1, -1] = n
        calls["x longer than max_len"] = lambda: mixer(s.x(2, n + 1))
        calls["positions beyond max_len"] = lambda: mixer(x, positions=far)
        calls["negative positions"] = lambda: mixer(x, positions=far.clamp_max(n - 1) - 1)
        if can.streaming:
            calls["a stream longer than max_len"] = lambda: _overrun(mixer, s.x(2, n), s.x(2, 1))
    if can.attn_mask:
        pairs = torch.ones(2, T, T, dtype=torch.bool)
        calls["attn_mask of floats"] = lambda: mixer(x, attn_mask=pairs.double())
        calls["attn_mask of another length"] = lambda: mixer(x, attn_mask=pairs[:, 1:])
    if can.context:
        calls["a context of other rows"] = lambda: mixer(x, s.x(3, 4))
        calls["a context of another width"] = lambda: mixer(x, s.x(2, 4)[..., :-1])
        calls["key_mask of x's length over a context"] = lambda: mixer(
            x, s.x(2, T - 1), key_mask=torch.ones(2, T, dtype=torch.bool)
        )
    if can.streaming:
        calls["a chunk of no tokens"] = lambda: mixer.extend(x[:, :0], mixer.init_state(2))
        calls["a state of other rows"] = lambda: mixer.extend(x, mixer.init_state(3))
        calls["a mask longer than the chunk"] = lambda: mixer.extend(
            x[:, :2], mixer.init_state(2), key_mask=inputs.key_masks(T)["left"]
        )
    if s.grid is not None:
        bigger, axes = (s.grid[0] + 1, *s.grid[1:]), len(s.grid)
        calls["a grid of more cells than tokens"] = lambda: mixer(x, grid=bigger, prefix=s.prefix)
        calls["a grid of another number of axes"] = lambda: mixer(x[:, :4], grid=(2, 2) if axes != 2 else (1, 2, 2))
        calls["a negative prefix"] = lambda: mixer(x, grid=s.grid, prefix=-1)
        calls["a grid with an empty side"] = lambda: mixer(x, grid=(0, *s.grid[1:]), prefix=s.prefix)  # type: ignore[index]  # not None, as asked above
    return calls


class Foreign(NamedTuple):
    """A state that belongs to no mixer."""

    keys: Tensor
    position: Tensor


def refuses_foreign_states(s: Subject) -> None:
    """A state of another mixer, of other options or of other dtypes raises one clear error.

    Type, sizes, rows and integer types are compared on entry.
    """
    mixer, x = s.build(), s.x()
    if not (mixer.capabilities.streaming or mixer.capabilities.keeps_context):
        raise NotApplicable("has no streaming state")
    state = mixer.extend(x, mixer.init_state(2))[1] if mixer.capabilities.streaming else mixer.init_state(2, context=x)
    twisted: dict[str, object] = {
        "of another type": Foreign(x, x[:, 0, 0]),
        "as a tuple": tuple(state),
        "as a list": list(state),
        "as a tensor": x,
    }
    for name, a in zip(state._fields, state, strict=True):
        for what, b in _twists(a).items():
            twisted[f"whose {name} {what}"] = state._replace(**{name: b})
    for what, wrong in twisted.items():
        expect_refusal(s, f"a state {what}", partial(mixer.extend, x, wrong))


def _twists(a: Tensor) -> dict[str, Tensor | None]:
    """Return wrong values for a field of a state: other numbers of rows, another width, another kind of number, no
    tensor.
    """
    wrong: dict[str, Tensor | None] = {
        "has one row more": torch.cat([a, a[:1]]),
        "has no rows": a[0],
        "has one axis more": a[..., None],
        "is no tensor": None,
    }
    if a.ndim > 2:
        wrong["is wider"] = torch.cat([a, a[..., :1]], -1)
    wrong["holds integers"] = a.to(torch.int16)
    if not a.is_floating_point():
        wrong["holds floats"] = a.double()
    return wrong


def _overrun(mixer: Mixer, x: torch.Tensor, more: torch.Tensor) -> None:
    _, state = mixer.extend(x, mixer.init_state(2))
    mixer.extend(more, state)
