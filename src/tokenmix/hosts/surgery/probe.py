"""Verify the computation of an attention module on random numbers, by comparison with our own attention."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...types import Options
from .build import adapter_for
from .families import CallForm
from .form_adapters import output_tokens, probe_mask
from .masks import window_mask
from .sites import Adapters, Site, modules_without_attention, unknown_attention
from .swap import swap_modules
from .weights import slots

TOKENS = 6
SPREAD = 2.0  # of queries and keys, so that a cap or another scale of logits shows
ALLOWED = 1e-4  # by which outputs may differ, relative to the largest
SMALL = 1 << 18  # numbers in a module up to which each layer is probed by itself
NUMBERED = ("layer_idx", "layer_id", "training")
MASKLESS = ("flash", "flex", "paged")  # implementations that read no masks, or need a GPU
CROSS = ("key_value_states", "encoder_hidden_states")


class Proofs:
    """Cache the result for each kind of module: the reason why it could not be verified, or None."""

    def __init__(self, model: nn.Module, adapter: Adapters = None):
        self.model = model
        self.found: dict[object, str | None] = {}
        self.unproven: dict[str, list[str]] = {}
        self.unknown = unknown_attention(model, adapter)

    def prove(self, site: Site) -> None:
        """Compare a module with softmax attention with its weights.

        A module that cannot be probed is taken by its class, and noted.

        Raises:
            MixerError: if it computes anything else, saying what differs.
        """
        module = self.model.get_submodule(site.name)
        why = _obstacle(module)
        if why is None:
            key = _likeness(module, site)
            if key not in self.found:
                self.found[key] = _compare_module(self.model, site, module)
            why = self.found[key]
        if why is not None:
            self.unproven.setdefault(why, []).append(site.name)

    def notes(self) -> Iterator[str]:
        """Yield a note for each reason why modules could not be probed, and for attention of no known family."""
        for why, names in self.unproven.items():
            which = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            yield f"unproven: {which} could not be probed ({why}); taken by class"
        if self.unknown:
            yield f"left alone: {', '.join(self.unknown)}, whose computation is unknown"
        for cls, names in modules_without_attention(self.model).items():
            yield f"no attention: {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "") + f", a {cls}"


def _obstacle(module: nn.Module) -> str | None:
    """Return why a module cannot be probed."""
    tensors = [*module.parameters(), *module.buffers()]
    if any(hasattr(m, "_hf_hook") for m in module.modules()):
        return "offloaded"
    if any(t.is_meta for t in tensors):
        return "without numbers, on the meta device"
    if any(type(t) not in (nn.Parameter, Tensor) or not t.is_floating_point() for t in module.parameters()):
        return "quantised or distributed"
    return None


def _likeness(module: nn.Module, site: Site) -> tuple[object, ...]:
    """Return a key that is equal for modules with the same computation and different weights."""
    parts: list[object] = [replace(site, name="", layer=None), _layer_type(module), id(getattr(module, "config", None))]
    if sum(p.numel() for p in module.parameters()) <= SMALL:
        parts.append(site.name)
    for name, part in module.named_modules():
        plain = [(k, repr(v)) for k, v in vars(part).items() if isinstance(v, (bool, int, float, str, tuple))]
        own = [(k, id(v)) for k, v in vars(part).items() if callable(v) and not isinstance(v, nn.Module)]
        shapes = [(n, tuple(p.shape)) for n, p in part.named_parameters(recurse=False)]
        parts.append((name, type(part), *(e for e in sorted(plain) if e[0] not in NUMBERED), *sorted(own), *shapes))
    return tuple(parts)


def _layer_type(module: nn.Module) -> str | None:
    kinds, index = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    return kinds[index] if kinds and index is not None and index < len(kinds) else None


def _compare_module(model: nn.Module, site: Site, module: nn.Module) -> str | None:
    """Compare a copy with random weights and our attention with the same; return why that is impossible."""
    check_weights(site, module)
    like = next(module.parameters())
    numbers = torch.Generator().manual_seed(0)

    def draw_tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, dtype=torch.float32, device="cpu").to(like.device)

    with _isolate_computation(like.device):
        holder = nn.Module()
        holder.add_module("site", _drawn_anew(module, draw_tensor))
        here = replace(site, name="site", beyond=None)
        for path in site.traits.neutral:
            _set_neutral(holder.get_submodule("site"), path)
        try:
            pieces, _ = adapter_for(holder, here, {"name": "attention"}, "copy")
        except MixerError as why:
            return str(why).rstrip(".")
        ours = swap_modules(holder, pieces, inplace=False).get_submodule("site").eval()
        theirs = holder.get_submodule("site")
        tokens = (site.traits.form.tokens(module) if site.traits.form else None) or TOKENS
        x, context = draw_tensor(2, tokens, site.dim), draw_tensor(2, tokens + 2, site.dim)
        try:
            args, options, valid = _call(model, site, theirs, x, context, draw_tensor)
            given = theirs(*args, **options)
        except Exception as why:  # a forward of another kind can raise any error
            how = "its adapter says" if site.adapter is not None else f"{site.family}'s attention is"
            said = f"{type(why).__name__}: {' '.join(str(why).split())[:100]}"
            raise MixerError(f"its {_kind(module)} cannot be called as {how} ({said})") from None
        wanted = output_tokens(given, site.traits.form)
        got = output_tokens(ours(*args, **options), site.traits.form)
    if wanted is None or got is None or wanted.shape != got.shape:
        shape = None if wanted is None else tuple(wanted.shape)
        raise MixerError(f"its {_kind(module)} gives {shape} for tokens of shape {tuple(x.shape)}")
    if site.traits.library == "torch" and not getattr(module, "batch_first", True):
        wanted, got = wanted.transpose(0, 1), got.transpose(0, 1)
    off = float((wanted - got)[valid].abs().max() / wanted[valid].abs().max().clamp_min(1e-30))
    if not off <= ALLOWED:
        raise MixerError(
            f"its {_kind(module)} is not softmax attention with its weights: {_difference(site, module, off)}"
        )
    return None


def check_weights(site: Site, module: nn.Module) -> None:
    """Refuse a module whose projections are no plain matrices."""
    state = module.state_dict()
    for slot in slots(site, module).values():
        if slot.weight not in state or state[slot.weight].ndim > 2:
            part = slot.weight.rpartition(".")[0]
            kind = type(_part(module, part)).__name__ if part else "missing"
            raise MixerError(f"its {_kind(module)} has no matrix {slot.weight}: {part or slot.weight} is {kind}")


def _part(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _kind(module: nn.Module) -> str:
    cls = type(module)
    return f"{cls.__module__}.{cls.__name__}" if cls.__name__ == "Attention" else cls.__name__


def _difference(site: Site, module: nn.Module, off: float) -> str:
    """Describe how a module differs from softmax attention: extra parts, or the difference of its outputs."""
    used = {slot.tensor(leaf) for slot in slots(site, module).values() for leaf in ("weight", "bias")}
    kept = site.traits.kept
    more = [n for n, _ in module.named_parameters() if n not in used and not n.startswith(kept)]
    if more:
        return f"it has {', '.join(more[:4])}"
    settings = (*vars(module).items(), *vars(getattr(module, "config", None) or nn.Module()).items())
    odd = {n: v for n, v in settings if ("cap" in n or "alibi" in n) and isinstance(v, (int, float)) and v}
    told = f"; it has {', '.join(f'{n}={v}' for n, v in odd.items())}" if odd else ""
    return f"outputs differ by {off:.1e} of the largest (a scale, cap, bias or gate of its own){told}"


@contextmanager
def _isolate_computation(device: torch.device) -> Iterator[None]:
    """Compute without gradients and autocast, in float32, and leave torch's generators as they are."""
    with (
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
    ):
        yield


def _drawn_anew(module: nn.Module, drawn: Callable[..., Tensor]) -> nn.Module:
    """Copy a module with random weights, without hooks; its config is a copy that computes on any device."""
    memo: dict[int, object] = {}
    for p in module.parameters():
        values = drawn(*p.shape)
        values = values * SPREAD / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.5 + values.sigmoid()
        memo[id(p)] = nn.Parameter(values, requires_grad=False)
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None and id(config) not in memo:
            memo[id(config)] = plain = copy.copy(config)
            chosen = str(getattr(config, "_attn_implementation", None))
            if any(name in chosen for name in MASKLESS):
                plain._attn_implementation = "eager"
    new = copy.deepcopy(module, memo).eval()
    for part in new.modules():
        for table in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            table.clear()
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.float()
    return new


def _call(
    model: nn.Module, site: Site, module: Any, x: Tensor, context: Tensor, drawn: Callable[..., Tensor]
) -> tuple[list[Tensor], Options, Tensor]:
    """Return how the host calls such a module, and the tokens (2, T) whose outputs count."""
    known, options = inspect.signature(type(module).forward).parameters, dict[str, Any]()
    valid = torch.ones(2, x.shape[1], dtype=torch.bool, device=x.device)
    family = site.traits
    if family.library == "torch":
        other = context if site.cross else x
        args = [x, other, other]
        return [a if module.batch_first else a.transpose(0, 1) for a in args], {"need_weights": False}, valid
    if family.form is not None:
        return [], _form_options(site, family.form, module, x, context, valid), valid
    if site.cross:
        options |= {name: context for name in CROSS if name in known}
    elif "attention_mask" in known or "attn_mask" in known:
        options["attention_mask" if "attention_mask" in known else "attn_mask"] = _mask(site, valid)[1]
    for name, tokens in (("position_embeddings", x), ("encoder_position_embeddings", context)):
        if name in known and family.adds_positions:
            options[name] = drawn(*tokens.shape)
        elif name in known:
            options[name] = _rotary(model, site, x, module)
    return [x], options, valid


def _mask(site: Site, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pairs (2, 1, T, T) that may be attended, as booleans and as numbers to add.

    Without an order, one token is padding: it is cleared in ``valid``.
    """
    n = valid.shape[1]
    allowed = window_mask(n, site.causal, site.window, valid.device) if site.causal or site.window else valid[0]
    allowed = allowed.expand(2, 1, n, n).clone()
    if not site.causal and site.window is None:
        valid[1, -1] = False
        allowed = allowed & valid[:, None, None]
    numbers = torch.zeros(allowed.shape, device=valid.device)
    return allowed, numbers.masked_fill(~allowed, torch.finfo(torch.float32).min)


def _form_options(site: Site, form: CallForm, module: Any, x: Tensor, context: Tensor, valid: Tensor) -> Options:
    """Return the arguments of a module that a ``CallForm`` describes."""

    def order_axes(tokens: Tensor) -> Tensor:
        return tokens if form.batch_first else tokens.transpose(0, 1)

    options: Options = {form.hidden: order_axes(x)}
    if site.cross and form.context is not None:
        options[form.context] = order_axes(context)
    elif form.mask is not None and form.mask_axes != "TS" or site.causal and form.mask is not None:
        allowed, numbers = _mask(site, valid)
        options[form.mask] = probe_mask(form, allowed, valid, numbers)
    return options | form.example(module, x)


def _set_neutral(module: nn.Module, path: str) -> None:
    """Clear a parameter or an attribute of a copy, if it is there."""
    *parents, last = path.split(".")
    try:
        owner = module.get_submodule(".".join(parents))
        found = getattr(owner, last)
    except AttributeError:
        return
    if isinstance(found, Tensor):
        found.zero_()
    else:
        setattr(owner, last, None)


def _rotary(model: nn.Module, site: Site, x: Tensor, module: nn.Module) -> Any:
    """Return cosines and sines by the host's own module."""
    parts = site.name.split(".")
    owners = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts) - 1, -1, -1)]
    rotary = next((o.rotary_emb for o in owners if isinstance(getattr(o, "rotary_emb", None), nn.Module)), None)
    if rotary is None:
        return None
    own: Any = copy.deepcopy(rotary)  # some change their frequencies as sequences grow
    if any(t.is_floating_point() and t.itemsize < x.itemsize for t in own.buffers()) and hasattr(own, "config"):
        own = type(own)(own.config).to(x.device)  # frequencies that were rounded with the weights
    kind = _layer_type(module)
    typed = len(inspect.signature(own.forward).parameters) > 2 and kind is not None
    return own(x, torch.arange(TOKENS, device=x.device)[None], *((kind,) if typed else ()))
