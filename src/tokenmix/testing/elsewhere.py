"""Promises on devices: hooks may load weights for each call, and tensors on another device are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..mixers import Mixer
from ..mixers.parts.weights_on_call import WeightsOnCall
from ..types import Options
from .refusals import expect_refusal
from .report import fail, same
from .streaming import stream
from .subject import Subject


def hooks_see_every_call(s: Subject) -> None:
    """Forward hooks run around ``forward`` and ``extend``, and weights that they load only for the call give the same
    numbers.
    """
    mixer, x = s.build(), s.x()
    calls = {name: call(mixer) for name, call in _calls(s, mixer, x).items()}
    with offload_tensors(mixer):
        for name, call in _calls(s, mixer, x).items():
            seen: list[str] = []
            hook = mixer.register_forward_pre_hook(lambda *_, seen=seen, name=name: seen.append(name))
            y = call(mixer)
            hook.remove()
            if not seen:
                fail(f"hooks do not see {name}", seed=s.seed)
            same(y, calls[name], f"{name} reads weights that its hooks have not fetched", seed=s.seed)


def _calls(s: Subject, mixer: Mixer, x: Tensor) -> dict[str, Callable[[Mixer], Tensor]]:
    calls: dict[str, Callable[[Mixer], Tensor]] = {"forward": lambda m: s.call(m, x)}
    here: Options = {"device": x.device, "dtype": x.dtype}
    if mixer.capabilities.context:
        context = s.x(length=s.context_length(mixer), stream=1)
        calls["forward over a context"] = lambda m: s.call(m, x, context)
        if mixer.facts.streaming:
            calls["extend over a context"] = lambda m: m.extend(x, m.init_state(2, context=context))[0]
    if mixer.capabilities.streaming:
        calls["extend"] = lambda m: stream(m, x, (3, s.length - 3), m.init_state(2, **here))[0]
    return calls


@contextmanager
def offload_tensors(model: nn.Module) -> Iterator[None]:
    """Keep each module's own tensors on the meta device except during its calls."""
    held = [
        (m, {n: t for n, t in (*m._parameters.items(), *m._buffers.items()) if t is not None}) for m in model.modules()
    ]

    def put_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> None:
        for name, t in tensors.items():
            (module._parameters if name in module._parameters else module._buffers)[name] = t  # type: ignore[assignment]  # as it was, or on meta

    hooks = []
    for module, own in held:
        away: dict[str, Tensor] = {
            n: nn.Parameter(t.to("meta")) if isinstance(t, nn.Parameter) else t.to("meta") for n, t in own.items()
        }
        hooks.append(module.register_forward_pre_hook(lambda m, args, own=own: put_tensors(m, own)))
        hooks.append(module.register_forward_hook(lambda m, args, y, away=away: put_tensors(m, away)))
        put_tensors(module, away)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, own in held:
            put_tensors(module, own)


def refuses_other_devices(s: Subject) -> None:
    """Masks, positions, contexts, states and parameters on another device than x raise one clear error."""
    mixer, x, T = s.build(), s.x(), s.length
    can, far = mixer.capabilities, torch.device("meta")
    ones, place = torch.ones(2, T, dtype=torch.bool, device=far), torch.zeros(2, T, dtype=torch.long, device=far)
    calls: dict[str, Callable[[], object]] = {
        "a key_mask": lambda: s.call(mixer, x, key_mask=ones),
        "positions": lambda: s.call(mixer, x, positions=place),
    }
    if can.attn_mask:
        calls["an attn_mask"] = lambda: s.call(mixer, x, attn_mask=ones[0, :, None].expand(T, T))
    if can.context:
        calls["a context"] = lambda: s.call(mixer, x, s.x(length=4, stream=1).to(far))
    if can.streaming:
        state = mixer.init_state(2)
        calls["a state"] = lambda: mixer.extend(x, pytree.tree_map(lambda a: a.to(far), state))
        calls["a key_mask of a chunk"] = lambda: mixer.extend(x, state, key_mask=ones)
    for what, call in calls.items():
        expect_refusal(s, f"{what} on another device than x", call, word="meta")
    _own_tensors_elsewhere(s, mixer, x)


def _own_tensors_elsewhere(s: Subject, mixer: Any, x: Tensor) -> None:
    """Move one tensor at a time of those the mixer reads itself; torch's own layers check theirs."""
    for module in (m for m in mixer.modules() if m is mixer or isinstance(m, WeightsOnCall)):
        for held in (module._parameters, module._buffers):
            for name, t in list(held.items()):
                if t is not None and t.numel():
                    held[name] = nn.Parameter(t.to("meta")) if isinstance(t, nn.Parameter) else t.to("meta")
                    expect_refusal(
                        s,
                        f"{name} of {type(module).__name__} on another device than x",
                        lambda: s.call(mixer, x),
                        word="meta",
                    )
                    held[name] = t
