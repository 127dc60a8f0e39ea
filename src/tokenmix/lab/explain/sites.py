"""The numbers of mixers at their places in a model: what enters and leaves each of them, and how it comes about."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...functional.layout.heads import by_head
from ...mixers import Inputs, Mixer
from ...mixers.attention import Attention
from ...types import Options
from ..report.pictures import effective_attention
from .families import Family, family

EXACT = 1e-4
"""The most by which recomputed outputs of a mixer may differ from its own, relative to the largest."""


class Place(NamedTuple):
    """A mixer of a model: part of the model, layer from 0, the name in its spec, and the module."""

    part: str
    layer: int
    name: str
    mixer: Mixer


class Call(NamedTuple):
    """One call of the mixer at a place: its arguments, its options and its output (T, D)."""

    place: Place
    args: tuple[Tensor, ...]
    given: Options
    output: Tensor


@dataclass
class Site:
    """A mixer at its place in the model, for one text: T rows that ask, S columns that are asked.

    Attributes:
        part: "encoder", "decoder" (its own words) or "cross" (from the decoder to the encoder) of an encoder-decoder;
            "lm" of a language model; "both" of an encoder, whose words see both sides.
        layer: counted from 0, one for each application of a block that is applied several times.
        mixer: name of the mixer.
        kind: "attention" where weights are softmax(q . k * scale + bias); else as in ``effective_attention``.
        x: what the mixer reads (T, D).
        context: what it reads of the source (S, D), in "cross".
        output: what it gives (T, D).
        weights: effective weights (G, T, S), one map for each head, or for each channel.
        allowed: pairs (T, S) that may meet.
        q, k, v: queries (H, T, e), keys and values (H, S, e); H is 1 for other mixers than attention.
        products: q . k (H, T, S), before the scale.
        bias: what is added to the scaled products (H, T, S).
        mixed: sum of weight times value (H, T, e).
        muted: by head, what is added to the mean loss when that head gives 0.
        family: what is told of mixers other than attention, and their own numbers.
    """

    part: str
    layer: int
    mixer: str
    kind: str
    x: Tensor
    context: Tensor | None
    output: Tensor
    weights: Tensor
    allowed: Tensor
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    products: Tensor | None = None
    scale: float = 1.0
    bias: Tensor | None = None
    mixed: Tensor | None = None
    muted: list[float] = field(default_factory=list)
    family: Family | None = None


@contextmanager
def record_mixers(places: list[Place]) -> Iterator[list[Call]]:
    """Note each call of the mixers inside the block; a block that is applied again counts as a further layer."""
    calls: list[Call] = []
    layers = {part: sum(place.part == part for place in places) for part in {place.part for place in places}}

    def note(place: Place, mixer: Mixer, args: tuple[Tensor, ...], given: Options, output: Tensor) -> None:
        before = sum(call.place.mixer is mixer for call in calls)
        calls.append(Call(place._replace(layer=place.layer + before * layers[place.part]), args, given, output[0]))

    hooks = [place.mixer.register_forward_hook(partial(note, place), with_kwargs=True) for place in places]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def sites_of(calls: list[Call], loss: Callable[[], float]) -> list[Site]:
    """Return the sites of the calls, with what muting each head of an attention adds to the loss."""
    usual, found = loss(), []
    for call in calls:
        site = _site(call)
        site.muted = _mute_heads(site, call.place.mixer, loss, usual)
        found.append(site)
    return found


def _site(call: Call) -> Site:
    (part, layer, name, mixer), args, given, output = call
    x, context = args[0], args[1] if len(args) > 1 else None
    T, S = x.shape[1], x.shape[1] if context is None else context.shape[1]
    allowed = torch.ones(T, S, dtype=torch.bool, device=x.device)
    site = Site(
        part=part,
        layer=layer,
        mixer=name,
        kind="attention",
        x=x[0],
        context=None if context is None else context[0],
        output=output,
        weights=output,
        allowed=allowed.tril() if mixer.causal else allowed,
    )
    if isinstance(mixer, Attention):
        _attend(site, mixer, x, context, given)
        return site
    with torch.enable_grad():  # the Jacobian needs it
        found = effective_attention(mixer, x, context, **given)
    site.weights, site.kind = found.weights.detach(), found.kind
    form = mixer.facts.functional_form()
    if form is not None:
        full = {"positions": None, "key_mask": None, "attn_mask": None, "grid": None, "prefix": 0, **given}
        asked, options = mixer.functional_args(Inputs(x, context, **full))
        _keep_projections(site, mixer, dict(zip(inspect.signature(form).parameters, asked, strict=False)))
        site.family = family(mixer, (x, context), asked, options)
    else:
        site.family = family(mixer, (x, context), (), {})
    return site


def _attend(site: Site, mixer: Attention, x: Tensor, context: Tensor | None, given: Options) -> None:
    """Follow attention step by step: products, scale, mask, softmax and the sum of values."""
    args, options = mixer.functional_args(Inputs(x, context, **given))
    groups = mixer.heads // mixer.kv_heads
    site.q = by_head(args[0], mixer.heads)[0]
    site.k, site.v = (by_head(a, mixer.kv_heads)[0].repeat_interleave(groups, 0) for a in args[1:3])
    site.scale = mixer.head_dim**-0.5 if options["scale"] is None else options["scale"]
    site.products = site.q @ site.k.transpose(1, 2)
    scaled = site.products * site.scale
    if len(args) > 3:
        bias = args[3] if isinstance(args[3], Tensor) else args[3](0, x.shape[1])
        site.bias = bias[0].expand_as(scaled)
        scaled = scaled + site.bias
    site.weights = scaled.masked_fill(~site.allowed, float("-inf")).softmax(-1)
    site.mixed = site.weights @ site.v
    output = mixer.out_proj(site.mixed.transpose(0, 1).flatten(1))
    gap = float((output - site.output).abs().max())
    if gap > EXACT * max(float(site.output.abs().max()), 1e-6):
        raise MixerError(
            f"look sentence: attention in layer {site.layer + 1} of {site.part!r} gives other numbers step by step "
            + f"(by {gap:.2g}); explain a model in float32."
        )


def _keep_projections(site: Site, mixer: Mixer, found: Options) -> None:
    """Keep the q, k and v of another mixer where it makes one of each for every token."""
    for name, length in (("q", site.weights.shape[1]), ("k", site.weights.shape[2]), ("v", site.weights.shape[2])):
        a, made = found.get(name), mixer._modules.get(f"{name}_proj")
        if made is not None and isinstance(a, Tensor) and a.ndim == 3 and a.shape[:2] == (1, length):
            setattr(site, name, a)


def _mute_heads(site: Site, mixer: Mixer, loss: Callable[[], float], usual: float) -> list[float]:
    """Return what muting each head of an attention adds to the loss."""
    if site.mixed is None:
        return []
    width, found = site.mixed.shape[-1], []

    def mute(head: int, _: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        y = args[0].clone()
        y[..., head * width : (head + 1) * width] = 0.0
        return (y,)

    for head in range(len(site.mixed)):
        hook = mixer.out_proj.register_forward_pre_hook(partial(mute, head))
        try:
            found.append(loss() - usual)
        finally:
            hook.remove()
    return found
