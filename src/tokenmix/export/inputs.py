"""Describe the subject of an export: a mixer or a model, with example inputs of any size.

Inputs are whole sequences, or the next tokens with a state.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import MixerError
from ..mixers import MIXERS, Mixer, State
from ..models import LM, ImageDensity
from ..system.calls import name_tensors, split_arguments, try_model
from ..types import Record

SHOWN = 7
"""The length of a call that shows a model's outputs."""


class Call(nn.Module):
    """Call a model on the whole input; ``place`` holds the fixed grid arguments of a mixer."""

    def __init__(self, model: nn.Module, **place: object):
        super().__init__()
        self.model, self.place = model, place

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Return the output of the model."""
        return self.model(x, **self.place) if key_mask is None else self.model(x, key_mask=key_mask, **self.place)


class Step(nn.Module):
    """Map the next tokens and a state to their outputs and the new state."""

    def __init__(self, model: LM | ImageDensity | Mixer):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Call ``extend``."""
        return self.model.extend(x, state)


class NarrowStep(nn.Module):
    """Call a step with a state in float32 where its own is in float64.

    Args:
        wide: for each tensor of the state, whether the step keeps it in float64.
    """

    def __init__(self, step: nn.Module, wide: list[bool]):
        super().__init__()
        self.step, self.wide = step, wide

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Widen the state, run the step, and narrow the new state."""
        leaves, tree = pytree.tree_flatten(state)
        widened = [a.double() if wide else a for a, wide in zip(leaves, self.wide, strict=True)]
        y, after = self.step(x, pytree.tree_unflatten(widened, tree))
        return y, narrow_state(after)


def narrow_state(state: State) -> State:
    """Return a state with float32 in place of float64."""
    return pytree.tree_map(lambda a: a.float() if a.dtype is torch.float64 else a, state)


@dataclass(frozen=True)
class Port:
    """Hold a module to trace, and how it is called.

    Args:
        example: makes the arguments for (batch, length): ``length`` tokens, or one chunk after ``length`` tokens.
        names, results: names of the arguments and of the outputs.
        longest: the largest length accepted; None: unlimited.
        size: the only length accepted; None: any.
        masked: the second argument is a mask (batch, length) of the first; outputs of masked tokens are undefined.
        tokenwise: for each output of a whole input, whether its second axis is that of the tokens.
        config: what the file says about the model; None: the model's own config.
        paddable: a mask of the second argument can hide padding.
    """

    who: str
    module: nn.Module
    names: tuple[str, ...]
    results: tuple[str, ...]
    example: Callable[[int, int], tuple[Any, ...]]
    longest: int | None = None
    size: int | None = None
    masked: bool = False
    tokenwise: tuple[bool, ...] = (True,)
    config: Record | None = None
    paddable: bool = True

    @property
    def decodes(self) -> bool:
        """Return whether a state goes in and out."""
        return "state" in self.names


def narrow_port(port: Port) -> Port:
    """Return the port of a decode step with its state in float32."""
    wide = [a.dtype is torch.float64 for a in pytree.tree_leaves(port.example(1, 0)[1])]

    def example(batch: int, length: int) -> tuple[Any, ...]:
        x, state = port.example(batch, length)
        return x, narrow_state(state)

    return replace(port, module=NarrowStep(port.module, wide), example=example)


PortFinder = Callable[[nn.Module, bool, bool, int], Port | None]
PORT_FINDERS: list[PortFinder] = []
"""Functions of (model, decode, key_mask, chunk) that describe how to call models of other libraries, or return None.

``hosts.surgery`` adds its own, because a room imports only from those above it.
"""


def find_port(
    model: nn.Module, *, decode: bool, key_mask: bool, chunk: int, grid: tuple[int, ...] | None, prefix: int
) -> Port:
    """Return how to call a mixer or a model of tokenmix.

    Raises:
        MixerError: if it cannot be exported with these options.
    """
    check_exportable(model)
    if not isinstance(chunk, int) or chunk < 1:
        raise MixerError(f"export: chunk must be an integer >= 1, got {chunk!r}.")
    if decode and (key_mask or grid is not None):
        raise MixerError("export: the decode step takes neither key_mask nor grid; leave them out.")
    for find in PORT_FINDERS:
        port = find(model, decode, key_mask, chunk)
        if port is not None and grid is not None:
            raise MixerError(f"export: grid is for mixers; {port.who} has its own, leave it out.")
        if port is not None:
            return port
    if decode:
        return _decode_port(model, chunk)
    if isinstance(model, Mixer):
        return _mixer_port(model, key_mask, grid, prefix)
    if grid is not None:
        raise MixerError(f"export: grid is for mixers; {type(model).__name__} has its own, leave it out.")
    if isinstance(model, LM):
        return Port(
            "LM",
            Call(model),
            *_port_names("tokens", "logits", key_mask),
            masked_example(token_example(model.vocab), key_mask),
            model.max_len,
            masked=key_mask,
        )
    if key_mask:
        raise MixerError(f"export: {type(model).__name__} takes no key_mask; leave it out.")
    if isinstance(model, ImageDensity):
        return Port(
            "ImageDensity",
            Call(model),
            *_port_names("tokens", "logits", False),
            masked_example(token_example(model.vocab), False),
            size=model.max_len,
        )
    return _image_port(model)


class OwnCall(nn.Module):
    """Call a model with its tensors, in order, in the places that they have among its arguments."""

    def __init__(self, model: nn.Module, given: object):
        super().__init__()
        self.model, self.given = model, given

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors among the outputs."""
        rest = iter(values)
        args, named = split_arguments(self.given)
        args = tuple(next(rest) if isinstance(a, Tensor) else a for a in args)
        named = {name: next(rest) if isinstance(a, Tensor) else a for name, a in named.items()}
        return tuple(name_tensors(self.model(*args, **named)).values())


def own_port(model: nn.Module, inputs: Callable[[int, int], object], size: int | None) -> Port:
    """Return how to call a model by the inputs that its user gives: a function of (length, batch).

    Args:
        size: the only length that is asked for; None: any.
    """
    check_exportable(model)
    who = type(model).__name__
    given = inputs(size or SHOWN, 1)
    args, named = split_arguments(given, "export: inputs")
    keys = [f"input_{i}" for i, a in enumerate(args) if isinstance(a, Tensor)]
    keys += [name for name, a in named.items() if isinstance(a, Tensor)]
    if not keys:
        raise MixerError(f"export: inputs({size or SHOWN}, 1) holds no tensor; return what {who} is called with.")

    def example(batch: int, length: int) -> tuple[Tensor, ...]:
        args, named = split_arguments(inputs(size or length, batch), "export: inputs")
        return tuple(a for a in (*args, *named.values()) if isinstance(a, Tensor))

    call = OwnCall(model, pytree.tree_map(lambda a: a[:0] if isinstance(a, Tensor) and a.ndim else a, given))
    try:
        results = try_model(model, given)
    except Exception as why:  # a model of the user's own can raise any error
        said = " ".join(str(why).split())[:160]
        raise MixerError(f"export: {who} cannot be called with inputs({size or SHOWN}, 1): {said}.") from None
    if not results:
        raise MixerError(f"export: {who} returns no tensor; let it return one, a tuple or a dict of tensors.")
    config: Record = {"host": who}
    return Port(who, call, tuple(keys), tuple(results), example, size=size, config=config, paddable=False)


def check_exportable(model: object) -> None:
    """Refuse a model that contains a mixer without export, is not float32, or is not on the CPU."""
    if not isinstance(model, nn.Module):
        raise MixerError(f"export: expects a mixer or a model of tokenmix, got {type(model).__name__}.")
    for path, module in model.named_modules():
        if isinstance(module, Mixer) and not module.capabilities.export:
            names = [name for name, cls in MIXERS.items() if cls is type(module)] or [type(module).__name__]
            listed = "docs/hosts/onnx.md lists what can be exported"
            raise MixerError(f"export: {path or 'the mixer'} is {names[0]}, which declares no export; {listed}.")
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_floating_point() and (value.dtype != torch.float32 or value.device.type != "cpu"):
            held = f"{name} is {value.dtype} on {value.device}"
            raise MixerError(f"export: {held}; export takes float32 on the CPU, call model.float().cpu() first.")


def _decode_port(model: nn.Module, chunk: int) -> Port:
    who = type(model).__name__
    if isinstance(model, Mixer) and not model.capabilities.streaming:
        why = "was built with causal=False" if model.facts.streaming else "has no streaming form"
        raise MixerError(f"export: {who} {why}, so there is no decode step; export the whole sequence.")
    if not isinstance(model, (Mixer, LM, ImageDensity)):
        raise MixerError(f"export: {who} reads whole images and has no decode step; leave decode out.")
    inputs = _features(model.dim) if isinstance(model, Mixer) else token_example(model.vocab)

    def example(batch: int, length: int) -> tuple[object, ...]:
        streaming: Any = model
        state = streaming.init_state(batch)
        if length:
            _, state = streaming.extend(inputs(batch, length), state)
        # torch would guard on any other layout
        return inputs(batch, chunk), pytree.tree_map(Tensor.contiguous, state)

    names = ("x", "state") if isinstance(model, Mixer) else ("tokens", "state")
    longest = None if model.max_len is None else model.max_len - chunk
    if longest is not None and longest < 1:
        left = f"leaves nothing of max_len={model.max_len} to decode"
        raise MixerError(f"export: chunk={chunk} {left} after it; make it smaller.")
    return Port(who, Step(model), names, ("y" if isinstance(model, Mixer) else "logits", "new_state"), example, longest)


def _mixer_port(mixer: Mixer, key_mask: bool, grid: tuple[int, ...] | None, prefix: int) -> Port:
    place = {} if grid is None else {"grid": tuple(grid), "prefix": prefix}
    size = None if grid is None else prefix + prod(grid)
    example = masked_example(_features(mixer.dim), key_mask)
    return Port(
        type(mixer).__name__,
        Call(mixer, **place),
        *_port_names("x", "y", key_mask),
        example,
        None if size else mixer.max_len,
        size,
        masked=key_mask,
    )


def _image_port(model: nn.Module) -> Port:
    config: Any = getattr(getattr(model, "backbone", model), "config", None)
    own = [p for p in signature(model.forward).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in own if p.default is p.empty] or [p.name for p in own[:1]]
    if not hasattr(config, "image_size") or not hasattr(config, "channels") or len(needed) != 1:
        takes = f"{type(model).__name__} is called with {', '.join(needed) or 'no argument'}"
        known = "mixers, language models, density models, models of images, and hosts whose attention was replaced"
        raise MixerError(f"export: {takes}; what can be exported are {known}.")
    example = image_example(config.channels, config.image_size)
    return Port(type(model).__name__, Call(model), *_port_names("images", "logits", False), example, size=0)


def image_example(channels: int, size: tuple[int, ...]) -> Callable[[int, int], tuple[Tensor]]:
    """Return a function of (batch, length) that makes images of one size, the same in every call."""
    return lambda batch, length: (
        torch.randn(batch, channels, *size, generator=_seeded_generator(batch, length), device="cpu"),
    )


def _port_names(argument: str, result: str, key_mask: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (argument, "key_mask") if key_mask else (argument,), (result,)


def _seeded_generator(batch: int, length: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * length + batch)


def _features(dim: int) -> Callable[[int, int], Tensor]:
    return lambda batch, length: torch.randn(
        batch, length, dim, generator=_seeded_generator(batch, length), device="cpu"
    )


def token_example(vocab: int) -> Callable[[int, int], Tensor]:
    """Return a function of (batch, length) that makes token numbers, the same in every call."""
    return lambda batch, length: torch.randint(
        vocab, (batch, length), generator=_seeded_generator(batch, length), device="cpu"
    )


def masked_example(inputs: Callable[[int, int], Tensor], key_mask: bool) -> Callable[[int, int], tuple[Tensor, ...]]:
    """Return a function that makes the arguments, with a mask if ``key_mask``.

    The mask hides different tokens in each row, leading ones among them, and never all.
    """

    def example(batch: int, length: int) -> tuple[Tensor, ...]:
        if not key_mask:
            return (inputs(batch, length),)
        mask = torch.rand(batch, length, generator=_seeded_generator(batch, length), device="cpu") < 0.8
        third, row = (torch.arange(n, device="cpu") for n in (length // 3, batch))
        mask[:, : length // 3] &= third >= row[:, None] % (length // 3 + 1)
        mask[:, length - 1 :] = True
        return inputs(batch, length), mask

    return example


@contextmanager
def silence_exporters() -> Iterator[None]:
    """Silence the exporters' warnings and log messages."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
