"""What the attention of a teacher got and gave, and what the mixers of a student give for the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MixerError
from .adapters import adapters_of
from .build import REPLACED_PARTS
from .masks import read_mask


class Call(NamedTuple):
    """One call of an attention module: its arguments, and the (B, T, D) it added to the residual stream."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    output: Tensor


def adapters_by_site(student: nn.Module) -> dict[str, Any]:
    """Site -> the adapter that stands there, in the model's order."""
    found = {}
    for name, adapter in adapters_of(student).items():
        path = REPLACED_PARTS.get(adapter.site.family, ("",))[0]
        found[name.removesuffix(path).removesuffix(".")] = adapter
    if not found:
        raise MixerError("distill: the student has no replaced attention; replace_mixers makes one.")
    return found


@contextmanager
def captured(teacher: nn.Module, adapters: Mapping[str, Any]) -> Iterator[dict[str, Call]]:
    """Inside, calls of the teacher fill the dictionary: site -> its last call."""
    entered: dict[str, Any] = {}
    calls: dict[str, Call] = {}
    handles = []
    for name, adapter in adapters.items():
        inside = REPLACED_PARTS.get(adapter.site.family, ("",))
        first, last = (_module(teacher, name, path) for path in (inside[0], inside[-1]))
        handles.append(first.register_forward_pre_hook(lambda m, args, kw, name=name: entered.update({name: (args, kw)}), with_kwargs=True))
        handles.append(last.register_forward_hook(lambda m, args, y, name=name: calls.update({name: _call(entered[name], y)})))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _module(teacher: nn.Module, name: str, path: str) -> nn.Module:
    try:
        return teacher.get_submodule(f"{name}.{path}".strip("."))
    except AttributeError:
        raise MixerError(f"distill: the teacher has no module {name!r}; teacher and student must come from one model.") from None


def _call(entered: tuple[tuple[Any, ...], dict[str, Any]], y: Any) -> Call:
    args, options = entered
    options = {k: None if k == "past_key_values" else v for k, v in options.items()}  # whole sequences: the student needs no state
    return Call(args, options, (y[0] if isinstance(y, tuple) else y).detach())


def layer_losses(adapters: Mapping[str, Any], calls: Mapping[str, Call]) -> dict[str, Tensor]:
    """mean |m_l(x_l) - a_l(x_l)|^2 / mean |a_l(x_l)|^2 for each site: a_l the teacher's attention, m_l the mixer, x_l what entered the teacher's layer.

    Padding takes no part, where the layer's own mask tells it.
    """
    losses = {}
    for name, adapter in adapters.items():
        if name not in calls:  # a decoder's cross attention that was given nothing to attend, a layer that was dropped
            continue
        call = calls[name]
        y = adapter(*call.args, **call.options)
        y = y[0] if isinstance(y, tuple) else y
        keep = _valid_tokens(adapter, call, y)
        mine, theirs = (y, call.output) if keep is None else (y[keep], call.output[keep])
        losses[name] = F.mse_loss(mine, theirs) / theirs.square().mean().clamp_min(torch.finfo(theirs.dtype).tiny)
    return losses


def _valid_tokens(adapter: Any, call: Call, y: Tensor) -> Tensor | None:
    """(B, T), True where a token is no padding; None: all are."""
    if adapter.site.cross or adapter.site.family in ("timm", "vit"):
        return None
    if adapter.site.family == "torch":
        mask = call.options.get("key_padding_mask")
        if mask is None or y.ndim != 3:
            return None
        mask = ~mask if mask.dtype == torch.bool else mask == 0
        return mask if adapter.batch_first else mask.T
    mask = call.options.get("attention_mask", call.args[1] if len(call.args) > 1 else None)
    return read_mask(mask, y.shape[0], y.shape[1], causal=adapter.mixer.causal, window=adapter.site.window, where=adapter.site.name).key_mask


def output_loss(student: Any, teacher: Any, keep: Tensor | None, temperature: float) -> Tensor:
    """tau^2 KL(softmax(z' / tau) || softmax(z / tau)) over tokens or rows, z the logits, primes the teacher's (Hinton et al. 2015, arXiv 1503.02531).

    A model without logits is compared by its last hidden states: their squared distance over the teacher's square.
    """
    (mine, logits), (theirs, _) = _final(student), _final(teacher)
    if mine.shape != theirs.shape:
        raise MixerError(f"distill: the student gives {tuple(mine.shape)}, the teacher {tuple(theirs.shape)}; they must be equal.")
    if keep is not None and keep.shape == mine.shape[:2] and mine.ndim == 3:
        mine, theirs = mine[keep], theirs[keep]
    if not logits:
        return F.mse_loss(mine, theirs) / theirs.square().mean()
    z, wanted = (F.log_softmax(a.flatten(0, -2).float() / temperature, -1) for a in (mine, theirs))
    return temperature**2 * F.kl_div(z, wanted, log_target=True, reduction="batchmean")


def _final(outputs: Any) -> tuple[Tensor, bool]:
    """What a model's call gave, and whether these are logits."""
    for name in ("logits", "last_hidden_state"):
        found = getattr(outputs, name, None)
        if isinstance(found, Tensor):
            return found, name == "logits"
    if isinstance(outputs, Tensor):
        return outputs, outputs.ndim == 2  # a classifier's (B, classes); hidden states have three axes
    raise MixerError(f"distill: finds neither logits nor last_hidden_state in what the model returns, a {type(outputs).__name__}.")
