"""Promises on torch's defaults: a default dtype or device set by the program changes no number of the layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..mixers import Mixer
from . import inputs
from .crash import own_line
from .report import fail, same
from .subject import Subject, gradients

OTHERS = (torch.bfloat16, torch.float64)


def same_under_another_default_dtype(s: Subject) -> None:
    """``torch.set_default_dtype`` changes no number: forward, masked, over a context, streamed and backward.

    Checked in float32 and in the default's own dtype. A layer built under that default has its dtype throughout, and
    with the weights of one that was not gives the same.
    """
    for dtype in (torch.float32, *OTHERS):
        mixer = s.build(dtype=dtype)
        calls = _calls(s, mixer, dtype)
        want = {name: call() for name, call in calls.items()}
        for other in OTHERS if dtype is torch.float32 else (dtype,):
            with default_dtype(other):
                _compare(calls, want, f"under the default dtype {other} a {dtype} layer", s)
        if dtype is not torch.float32:
            with default_dtype(dtype):
                twin = s.raw().eval()
            for name, p in twin.named_parameters():
                if p.is_floating_point() and p.dtype != dtype:
                    fail(f"{name} of a layer built under the default dtype {dtype} is {p.dtype}", seed=s.seed)
            twin.load_state_dict(mixer.state_dict())
            x = s.x(dtype=dtype)
            with torch.no_grad():
                got, as_built = s.call(twin, x), s.call(mixer, x)
            same(got, as_built, f"a layer built under the default dtype {dtype} differs", tol=0.0, seed=s.seed)


def same_under_another_default_device(s: Subject) -> None:
    """``torch.set_default_device`` changes no number: forward, masked, over a context, streamed and backward.

    The layer, its inputs and its state stay where they are.
    """
    for dtype in (torch.float32, torch.float64):
        mixer = s.build(dtype=dtype)
        calls = _calls(s, mixer, dtype)
        want = {name: call() for name, call in calls.items()}
        with torch.device("meta"):
            _compare(calls, want, f"under the default device meta a {dtype} layer", s)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype inside a ``with`` block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _calls(s: Subject, mixer: Mixer, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Return calls by name whose arguments are made already."""
    x, masks = s.x(dtype=dtype), inputs.key_masks(s.length)
    mask, holes = masks["mixed"], masks["holes"]
    leaves = {"x": x.clone().requires_grad_(), **{n: p for n, p in mixer.named_parameters() if p.requires_grad}}
    spoilt = x.index_fill(1, torch.zeros(1, dtype=torch.long), float("nan"))

    def without_gradient(call: Callable[[], object]) -> Callable[[], object]:
        return torch.no_grad()(call)

    calls = {
        "forward": without_gradient(lambda: s.call(mixer, x)),
        "masked": without_gradient(lambda: s.call(mixer, x, key_mask=mask)),
        "of a token that is NaN": without_gradient(lambda: s.call(mixer, spoilt).nan_to_num(7.0)),
        "backward": lambda: gradients(s.call(mixer, leaves["x"], key_mask=holes).sum(), leaves),
    }
    if mixer.capabilities.context:
        context = s.x(length=s.context_length(mixer), stream=1, dtype=dtype)
        calls["over a context"] = without_gradient(lambda: s.call(mixer, x, context))
    if mixer.capabilities.streaming:
        chunk, more = x[:, :3].contiguous(), x[:, 3:4].contiguous()
        state = mixer.extend(chunk, mixer.init_state(2))[1]
        calls["streamed"] = without_gradient(lambda: mixer.extend(more, mixer.extend(chunk, mixer.init_state(2))[1]))
        calls["streamed with gradients"] = lambda: mixer.extend(more, state)
    return calls


def _compare(calls: dict[str, Callable[[], object]], want: dict[str, object], what: str, s: Subject) -> None:
    """Make each call again, and compare what it returns tensor by tensor, without a tolerance."""
    for name, call in calls.items():
        try:
            found = pytree.tree_leaves(call())
        except Exception as error:  # torch raises errors of many types here
            where = own_line(error, library=s.cls.__module__.startswith("tokenmix."))
            fail(f"{what} raises ({name}) {type(error).__name__}: {str(error)[:200]}, at {where}", seed=s.seed)
        for a, b in zip(found, pytree.tree_leaves(want[name]), strict=True):
            if isinstance(a, Tensor):
                if a.dtype != b.dtype or a.device != b.device:
                    fail(f"{what} gives {a.dtype} on {a.device} ({name}), not {b.dtype} on {b.device}", seed=s.seed)
                same(a, b, f"{what} gives other numbers ({name})", tol=0.0, seed=s.seed)
