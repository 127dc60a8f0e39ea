"""Capture inputs and outputs of a teacher's attention, and compare a student's mixers on the same inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MixerError
from ...mixers import Mixer
from ...types import Options
from ..cache_names import CACHE_NAMES
from ..patch_grid import find_patch_embedding
from .adapters import adapters_of, is_adapter, site_name
from .form_adapters import FormAdapter, output_tokens
from .masks import read_mask
from .sites import Site


class Call(NamedTuple):
    """Hold one call of an attention module: its arguments, and the (B, T, D) it added to the residual stream."""

    args: tuple[Any, ...]
    options: Options
    output: Tensor


class ByHand:
    """Stand for a module of a student that holds a mixer where the teacher has another class.

    Args:
        module: the student's.
        theirs: the teacher's.
    """

    site = patches = None

    def __init__(self, module: nn.Module, theirs: nn.Module):
        self.module = self.mixer = module
        mixers = {type(m).__name__: None for m in module.modules() if isinstance(m, Mixer)}
        self.spec, self.origin = {"name": "+".join(mixers)}, ({"": theirs},)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the module."""
        return self.module(*args, **options)

    def modules(self) -> Iterator[nn.Module]:
        """Return the module and its parts."""
        return self.module.modules()


def adapters_by_site(student: nn.Module, teacher: nn.Module | None = None) -> dict[str, Any]:
    """Return the adapter at each site, in the model's order, and modules with mixers that were assigned by hand."""
    found = {site_name(name, adapter): adapter for name, adapter in adapters_of(student).items()}
    if teacher is not None:
        found |= _find_assigned(student, teacher, "")
    if not found:
        how = "replace_mixers makes one, or assign a mixer where the teacher has its attention"
        raise MixerError(f"distill: the student has no replaced attention; {how}.")
    return found


def _find_assigned(student: nn.Module, teacher: nn.Module, prefix: str) -> dict[str, Any]:
    """Return the outermost modules that hold a mixer and are of another class than the teacher's."""
    found: dict[str, Any] = {}
    for name, module in student.named_children():
        theirs = teacher._modules.get(name)
        if theirs is None or is_adapter(module):
            continue
        if type(module) is not type(theirs) and any(isinstance(m, Mixer) for m in module.modules()):
            if not any(map(is_adapter, module.modules())):
                found[prefix + name] = ByHand(module, theirs)
        else:
            found |= _find_assigned(module, theirs, f"{prefix}{name}.")
    return found


@contextmanager
def capture_calls(teacher: nn.Module, adapters: Mapping[str, Any]) -> Iterator[dict[str, Call]]:
    """Record calls of the teacher inside the context: site -> its last call."""
    entered: dict[str, tuple[tuple[Any, ...], Options]] = {}
    calls: dict[str, Call] = {}
    handles = []
    watched = set()
    for name, adapter in adapters.items():
        found = None if getattr(adapter, "patches", None) is None else _patch_embedding(teacher, name, adapter)
        if found is not None and found not in watched:  # the mixers are called on the teacher's patches
            watched.add(found)
            handles.append(found.register_forward_hook(adapter.patches.note))
        parts = list(adapter.origin[0])
        first, last = (_module(teacher, name, path) for path in (parts[0], parts[-1]))
        whole = adapter.site if len(parts) == 1 else None  # the last of several parts is a projection
        handles.append(
            first.register_forward_pre_hook(
                lambda m, args, kw, name=name: entered.update({name: (args, kw)}), with_kwargs=True
            )
        )
        handles.append(
            last.register_forward_hook(
                lambda m, args, y, name=name, site=whole: calls.update({name: _call(entered[name], y, site)})
            )
        )
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _patch_embedding(teacher: nn.Module, name: str, adapter: Any) -> nn.Module | None:
    found = find_patch_embedding(teacher, name, adapter.site.patch)
    return None if found is None else found[0]


def _module(teacher: nn.Module, name: str, path: str) -> nn.Module:
    try:
        return teacher.get_submodule(f"{name}.{path}".strip("."))
    except AttributeError:
        hint = "teacher and student must come from one model"
        raise MixerError(f"distill: the teacher has no module {name!r}; {hint}.") from None


def _call(entered: tuple[tuple[Any, ...], Options], y: Any, site: Site | None) -> Call:
    args, options = entered
    form = None if site is None else site.traits.form
    caches = CACHE_NAMES if form is None else form.cache
    output = output_tokens(y, form)
    assert output is not None
    # whole sequences: the student needs no state
    options = {k: None if k in caches else v for k, v in options.items()}
    return Call(args, options, output.detach())


def layer_losses(adapters: Mapping[str, Any], calls: Mapping[str, Call]) -> dict[str, Tensor]:
    """Compute mean |m_l(x_l) - a_l(x_l)|^2 / mean |a_l(x_l)|^2 for each site.

    a_l is the teacher's attention, m_l the mixer, x_l the input of the teacher's layer. Padding is excluded if the
    layer's own mask shows it.
    """
    losses = {}
    for name, adapter in adapters.items():
        if name not in calls:  # cross-attention without a context, or a layer dropped at random
            continue
        call = calls[name]
        form = None if adapter.site is None else adapter.site.traits.form
        y = output_tokens(adapter(*call.args, **call.options), form)
        assert y is not None
        keep = _valid_tokens(adapter, call, y)
        mine, theirs = (y, call.output) if keep is None else (y[keep], call.output[keep])
        losses[name] = F.mse_loss(mine, theirs) / theirs.square().mean().clamp_min(torch.finfo(theirs.dtype).tiny)
    return losses


def _valid_tokens(adapter: Any, call: Call, y: Tensor) -> Tensor | None:
    """Return the mask of valid tokens (B, T); None: all are valid."""
    if adapter.site is None:  # how the module is called is its own affair
        return None
    library = adapter.site.traits.library
    if adapter.site.cross or adapter.site.grid is not None or library == "timm":
        return None
    if library == "torch":
        mask = call.options.get("key_padding_mask")
        if mask is None or y.ndim != 3:
            return None
        mask = ~mask if mask.dtype == torch.bool else mask == 0
        return mask if adapter.batch_first else mask.T
    if isinstance(adapter, FormAdapter):
        mask = adapter.read_tokens_mask(call.args, call.options)
    else:
        mask = call.options.get("attention_mask", call.args[1] if len(call.args) > 1 else None)
    return read_mask(
        mask, y.shape[0], y.shape[1], causal=adapter.mixer.causal, window=adapter.site.window, where=adapter.site.name
    ).key_mask


def output_loss(student: object, teacher: object, keep: Tensor | None, temperature: float) -> Tensor:
    """Compute tau^2 KL(softmax(z' / tau) || softmax(z / tau)) over tokens or rows.

    z are the logits, z' the teacher's (Hinton et al. 2015, arXiv 1503.02531). Models without logits are compared by
    their last hidden states: the squared distance over the square of the teacher's.
    """
    (mine, logits), (theirs, _) = final_output(student), final_output(teacher)
    if mine.shape != theirs.shape:
        shapes = f"the student gives {tuple(mine.shape)}, the teacher {tuple(theirs.shape)}"
        raise MixerError(f"distill: {shapes}; they must be equal.")
    if keep is not None and keep.shape == mine.shape[:2] and mine.ndim == 3:
        mine, theirs = mine[keep], theirs[keep]
    if not logits:
        return F.mse_loss(mine, theirs) / theirs.square().mean()
    z, wanted = (F.log_softmax(a.flatten(0, -2).float() / temperature, -1) for a in (mine, theirs))
    return temperature**2 * F.kl_div(z, wanted, log_target=True, reduction="batchmean")


def final_output(outputs: object) -> tuple[Tensor, bool]:
    """Return the tensor to compare from a model's output, and whether it holds logits."""
    for name in ("logits", "last_hidden_state"):
        found = getattr(outputs, name, None)
        if isinstance(found, Tensor):
            return found, name == "logits"
    if isinstance(outputs, Tensor):
        return outputs, outputs.ndim == 2  # a classifier returns (B, classes); hidden states have three axes
    kind = type(outputs).__name__
    raise MixerError(f"distill: finds neither logits nor last_hidden_state in the model's output, a {kind}.")
