"""Say how export calls a host with replaced attention: its whole inputs, or its decode step with the mixers' states."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import MixerError
from ...export.inputs import Port, image_example, masked_example, token_example
from ...mixers import Mixer
from ...mixers.attention import Attention
from ...system.calls import try_model
from ...types import Options, Record
from ..cache_names import find_cache_name, returned_cache
from .adapters import adapters_of
from .families import first_position
from .sites import find_attention, modules_without_attention

OTHERWISE = "torch.onnx takes any model, and here inputs=, a function of (length, batch) that returns its arguments"
SHORT = 5
"""Tokens of the calls that show a model's outputs."""


class HostState(NamedTuple):
    """Hold the state of a host between two decode steps: each layer's mixer's, and the next position (B,)."""

    layers: tuple[Any, ...]
    position: Tensor


class HostCall(nn.Module):
    """Call a host by the name of its input; return its outputs ``results`` as a tuple, or the tensor of a plain one."""

    def __init__(self, model: nn.Module, name: str | None, fixed: Options, results: tuple[str, ...] = ()):
        super().__init__()
        self.model, self.name, self.fixed, self.results = model, name, fixed, results

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        """Return the tensors among the outputs."""
        if self.name is None:
            return self.model(x)
        masked = {}
        if mask is not None:
            for axis in (0, 1):  # one name for both axes in the file
                torch._check(mask.shape[axis] == x.shape[axis])
            masked = {"attention_mask": mask.long()}
        outputs = self.model(**{self.name: x}, **masked, **self.fixed)
        return tuple(outputs[name] for name in self.results)


class HostStep(nn.Module):
    """Map the next tokens (B, C) and a state to logits and the new state.

    The cache that the host sees counts no earlier tokens: positions are given, and masks are the mixers' states'.
    """

    def __init__(self, model: nn.Module, cache_name: str, result: str):
        super().__init__()
        self.model, self.cache_name, self.result = model, cache_name, result

    def forward(self, x: Tensor, state: HostState) -> tuple[Tensor, HostState]:
        """Return the host's output for the new tokens, and the state after them."""
        from transformers import DynamicCache

        from ..huggingface.cache import TokenMixStateLayer

        cache = DynamicCache()
        cache.layers = [TokenMixStateLayer() for _ in state.layers]
        layers: list[Any] = cache.layers
        for layer, held in zip(layers, state.layers, strict=True):
            layer.state = held
        first = first_position(self.model.config)
        positions = first + state.position[:, None] + torch.arange(x.shape[1], device=x.device)
        outputs = self.model(input_ids=x, position_ids=positions, use_cache=True, **{self.cache_name: cache})
        after = tuple(layer.state for layer in layers)
        return outputs[self.result], HostState(after, state.position + x.shape[1])


class CacheStep(nn.Module):
    """Map the next tokens (B, C) and a state to logits and the new state, by the cache that transformers makes.

    The state of a layer is the tensors of its cache: keys and values, what a convolution read last, a recurrence's
    state. They are zeros, or no keys, before the first token.
    """

    def __init__(self, model: nn.Module, cache_name: str, result: str):
        super().__init__()
        self.model, self.cache_name, self.result = model, cache_name, result
        self.placed = "position_ids" in inspect.signature(model.forward).parameters
        ids = torch.zeros(1, SHORT, dtype=torch.long, device="cpu")
        with torch.no_grad():
            self.cache: Any = returned_cache(model(input_ids=ids, use_cache=True))

    def forward(self, x: Tensor, state: HostState) -> tuple[Tensor, HostState]:
        """Return the host's output for the new tokens, and the state after them."""
        cache = copy.copy(self.cache)
        cache.layers = [_replace_tensors(*each) for each in zip(self.cache.layers, state.layers, strict=True)]
        positions = state.position[:, None] + torch.arange(x.shape[1], device=x.device)
        placed = {"position_ids": positions} if self.placed else {}
        outputs = self.model(input_ids=x, use_cache=True, **placed, **{self.cache_name: cache})
        after = tuple(tuple(_cache_tensors(layer).values()) for layer in returned_cache(outputs).layers)
        return outputs[self.result], HostState(after, state.position + x.shape[1])

    def start(self, batch: int) -> HostState:
        """Return the state before the first token."""
        layers = []
        for layer in self.cache.layers:
            shapes = {key: [batch, *a.shape[1:]] for key, a in _cache_tensors(layer).items()}
            for (name, _), shape in shapes.items():
                if name in ("keys", "values"):
                    shape[-2] = 0
            layers.append(tuple(a.new_zeros(shapes[key]) for key, a in _cache_tensors(layer).items()))
        return HostState(tuple(layers), torch.zeros(batch, dtype=torch.long, device="cpu"))


def _cache_tensors(layer: Any) -> dict[tuple[str, Any], Tensor]:
    """Return the tensors of a layer of a cache: (attribute, key in a dictionary or None) -> tensor."""
    found: dict[tuple[str, Any], Tensor] = {}
    for name, value in vars(layer).items():
        each = value.items() if isinstance(value, dict) else ((None, value),)
        found |= {(name, key): a for key, a in each if isinstance(a, Tensor)}
    return found


def _replace_tensors(layer: Any, tensors: Iterable[Tensor]) -> Any:
    """Copy a layer of a cache with other tensors, which stay as they are."""
    new = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(new, name, dict(value))
    for (name, key), a in zip(_cache_tensors(layer), tensors, strict=True):
        if key is None:
            setattr(new, name, a.clone())
        else:
            getattr(new, name)[key] = a.clone()
    return new


def host_port(model: nn.Module, decode: bool, key_mask: bool, chunk: int) -> Port | None:
    """Return how to call a host, with its own attention or replaced, also by hand; None for any other model.

    Raises:
        MixerError: for a host whose inputs are not known, or that has no decode step, naming what works.
    """
    host: Any = model
    adapters = adapters_of(model)
    theirs = hasattr(model, "main_input_name") or hasattr(model, "default_cfg")
    if not adapters and (not theirs or type(model).__module__.startswith("tokenmix.")):
        return None
    about: Record = {adapter.site.name: adapter.spec for adapter in adapters.values()}
    if not adapters:
        about = {n: {"name": type(m).__name__} for n, m in model.named_modules() if isinstance(m, Mixer)}
    who = type(model).__name__
    config = {"host": who, "mixers": about}
    if "decoder_input_ids" in inspect.signature(host.forward).parameters:
        part = "export_onnx(model.get_encoder(), path) exports the half that reads whole inputs"
        raise MixerError(f"export: a {who} reads two sequences; {part}.")
    if decode and not adapters:
        if about:
            by_hand = "its mixers were assigned by hand, and where their states are is not known"
            raise MixerError(f"export: {who}: {by_hand}; leave decode out to export whole inputs.")
        return _cache_port(host, chunk, config)
    if decode:
        return _step_port(host, adapters, chunk, config)
    if hasattr(host, "patch_embed") and hasattr(host, "default_cfg"):
        return _image_port(host, None, host.patch_embed.proj.in_channels, host.patch_embed.img_size, key_mask, config)
    name = getattr(host, "main_input_name", None)
    if name == "pixel_values" and hasattr(getattr(host, "config", None), "image_size"):
        size = host.config.image_size
        size = (size, size) if isinstance(size, int) else tuple(size)
        return _image_port(host, name, host.config.num_channels, size, key_mask, config)
    if name != "input_ids":
        raise MixerError(f"export: how to call a {who} is not known; {OTHERWISE}.")
    return _token_port(host, key_mask, config)


def _token_port(host: nn.Module, key_mask: bool, config: Record) -> Port:
    """Return the port of a model that reads token numbers, with a name for each tensor among its outputs."""
    known = inspect.signature(host.forward).parameters
    if key_mask and "attention_mask" not in known:
        raise MixerError(f"export: {type(host).__name__} takes no attention_mask; leave key_mask out.")
    tokens = token_example(_vocabulary(host))
    fixed = {"return_dict": True} | ({"use_cache": False} if "use_cache" in known else {})
    first, second = (_outputs(host, {"input_ids": tokens(2, n), **fixed}) for n in (SHORT, SHORT - 1))
    results = _order(first)
    return Port(
        type(host).__name__,
        HostCall(host, "input_ids", fixed, results),
        ("input_ids", "attention_mask") if key_mask else ("input_ids",),
        results,
        _with_long_mask(tokens, key_mask),
        token_limit(host),
        masked=key_mask,
        tokenwise=tuple(first[name][1:2] == (SHORT,) and second[name][1:2] == (SHORT - 1,) for name in results),
        config=config,
    )


def _with_long_mask(tokens: Callable[[int, int], Tensor], key_mask: bool) -> Callable[[int, int], tuple[Tensor, ...]]:
    """Return the example with its mask as 0 and 1, as transformers' tokenizers give it."""
    example = masked_example(tokens, key_mask)
    return lambda batch, length: tuple(a.long() for a in example(batch, length))


def _image_port(
    host: nn.Module, name: str | None, channels: int, size: tuple[int, ...], key_mask: bool, config: Record
) -> Port:
    who, example = type(host).__name__, image_example(channels, tuple(size))
    if key_mask:
        raise MixerError(f"export: {who} takes no attention_mask; leave key_mask out.")
    if name is None:
        return Port(who, HostCall(host, None, {}), ("images",), ("logits",), example, size=0, config=config)
    results = _order(_outputs(host, {name: example(1, 0)[0], "return_dict": True}))
    call = HostCall(host, name, {"return_dict": True}, results)
    return Port(who, call, (name,), results, example, size=0, tokenwise=(False,) * len(results), config=config)


def _outputs(host: nn.Module, given: Options) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors among a model's outputs, by name."""
    try:
        found = try_model(host, given)
    except (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError) as why:
        needs, said = ", ".join(n for n in given if n in CALLED), " ".join(str(why).split())[:160]
        raise MixerError(
            f"export: {type(host).__name__} cannot be called with {needs} alone ({said}); {OTHERWISE}."
        ) from why
    return {name: tuple(value.shape) for name, value in found.items()}


CALLED = ("input_ids", "pixel_values")
FIRST = ("logits", "last_hidden_state")


def _order(found: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the outputs, logits or the last hidden states first."""
    return tuple(sorted(found, key=lambda name: name not in FIRST))


def _step_port(host: nn.Module, adapters: dict[str, Any], chunk: int, config: Record) -> Port:
    """Return the port of the decode step of a decoder all of whose layers keep a mixer's state."""
    who = type(host).__name__
    layers = sorted(adapters.values(), key=lambda adapter: adapter.site.layer or 0)
    cache_name = _check_decoder(host, layers)
    tokens = token_example(_vocabulary(host))
    result = _order(_outputs(host, {"input_ids": tokens(1, SHORT), "use_cache": False, "return_dict": True}))[0]
    step = HostStep(host, cache_name, result)

    def example(batch: int, length: int) -> tuple[Any, ...]:
        start = torch.zeros(batch, dtype=torch.long, device="cpu")
        state = HostState(tuple(a.mixer.init_state(batch) for a in layers), start)
        if length:
            state = step(tokens(batch, length), state)[1]
        # torch would guard on any other layout
        return tokens(batch, chunk), pytree.tree_map(Tensor.contiguous, state)

    limit = token_limit(host)
    longest = None if limit is None else limit - chunk
    if longest is not None and longest < 1:
        left = f"leaves nothing of the {limit} tokens that the model takes"
        raise MixerError(f"export: chunk={chunk} {left} after it; make it smaller.")
    return Port(who, step, ("input_ids", "state"), (result, "new_state"), example, longest, config=config)


def _cache_port(host: Any, chunk: int, config: Record) -> Port:
    """Return the port of the decode step of a host that keeps its own mixing, such as a hybrid."""
    who, whole = type(host).__name__, "leave decode out to export whole inputs"
    name = find_cache_name(host)
    if name is None:
        raise MixerError(f"export: {who} has no cache, so there is no decode step; {whole}.")
    tokens = token_example(_vocabulary(host))
    result = _order(_outputs(host, {"input_ids": tokens(1, SHORT), "use_cache": False, "return_dict": True}))[0]
    step = CacheStep(host, name, result)
    if step.cache is None:
        raise MixerError(f"export: {who} returns no cache, so there is no decode step; {whole}.")
    other = sorted({type(layer).__name__ for layer in step.cache.layers} - CACHES)
    if other:
        raise MixerError(f"export: {who} caches by {', '.join(other)}, which keeps more than tensors; {whole}.")
    if not step.placed and any(name == "keys" for layer in step.cache.layers for name, _ in _cache_tensors(layer)):
        raise MixerError(f"export: {who} has keys in its cache and takes no position_ids; {whole}.")
    _check_step(step, tokens(2, SHORT + 1), whole)

    def example(batch: int, length: int) -> tuple[Any, ...]:
        state = step.start(batch)
        if length:
            state = step(tokens(batch, length), state)[1]
        # torch would guard on any other layout
        return tokens(batch, chunk), pytree.tree_map(Tensor.contiguous, state)

    limit = token_limit(host)
    return Port(
        who, step, ("input_ids", "state"), (result, "new_state"), example, limit and limit - chunk, config=config
    )


def _check_step(step: CacheStep, ids: Tensor, whole: str) -> None:
    """Refuse a host whose steps are not its whole sequence: not every cache of transformers goes on rightly."""
    outputs, state = [], step.start(len(ids))
    with torch.no_grad():
        wanted = step.model(input_ids=ids, use_cache=False)[step.result]
        for token in ids.split(1, 1):
            y, state = step(token, state)
            outputs.append(y)
    apart = float((torch.cat(outputs, 1) - wanted).abs().max() / wanted.abs().max())
    if not apart <= LOST:
        who = type(step.model).__name__
        raise MixerError(
            f"export: {who} computes other numbers token by token than at once ({apart:.1e} of the largest): its cache "
            f"does not go on rightly; tokenmix.hosts.cpu_kernels mends some, or {whole}."
        )


CACHES = {"DynamicLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer"}
"""Layers of transformers' caches all of whose state is tensors."""
LOST = 1e-3
"""The most that steps may differ from a whole sequence, relative to the largest number."""


def _check_decoder(host: nn.Module, layers: list[Any]) -> str:
    """Refuse a host without a decode step that a program can hold; return the name of its cache."""
    whole = "leave decode out to export whole inputs"
    who, known, name = type(host).__name__, inspect.signature(host.forward).parameters, find_cache_name(host)
    if name is None or "position_ids" not in known or not all(adapter.mixer.causal for adapter in layers):
        kept = "no causal mixers" if name and "position_ids" in known else "no cache, or no position_ids"
        raise MixerError(f"export: {who} has {kept}, so there is no decode step; {whole}.")
    if rest := [site.name for site in find_attention(host)]:
        some = ", ".join(rest[:3]) + (", ..." if len(rest) > 3 else "")
        every = "replace them too (also by 'attention', whose state is a tensor)"
        raise MixerError(f"export: {some} keep the host's attention, whose cache is no tensor; {every}, or {whole}.")
    if other := modules_without_attention(host):
        raise MixerError(f"export: {who} also mixes by {', '.join(other)}, with states of its own; {whole}.")
    for adapter in layers:
        spec, where = adapter.spec["name"], adapter.site.name
        if adapter.site.cross or not adapter.mixer.capabilities.streaming:
            why = "attends another sequence" if adapter.site.cross else f"is {spec}, which has no streaming form"
            raise MixerError(f"export: {where} {why}, so there is no decode step; {whole}.")
        if adapter.site.window is not None and isinstance(adapter.mixer, Attention):
            local = f"replace it by local, window={adapter.site.window}"
            raise MixerError(f"export: {where} has a window, which attention's state does not keep; {local}.")
    if [adapter.site.layer for adapter in layers] != list(range(len(layers))):
        raise MixerError(f"export: the layers of {who} are not numbered from 0 in its cache; {whole}.")
    return name


def _vocabulary(host: Any) -> int:
    return int(host.config.get_text_config().vocab_size)


def token_limit(host: nn.Module) -> int | None:
    """Return the tokens that the model and its mixers have positions for; rotary ones have no limit."""
    adapters = adapters_of(host).values()
    sites = [adapter.site for adapter in adapters] + find_attention(host)
    limits = [s.max_len for s in sites if s.max_len is not None and not s.rotary and s.grid is None and not s.cross]
    limits += [adapter.mixer.max_len for adapter in adapters if adapter.mixer.max_len is not None]
    return min(limits, default=None)
