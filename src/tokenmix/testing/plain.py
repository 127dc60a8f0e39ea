"""The promises that can be checked on any module on (B, T, D), whatever its base class."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..errors import MixerError
from ..types import Options
from . import inputs
from .batching import _output_of
from .report import Broken, NotApplicable, collect_failures, fail, same
from .subject import Subject
from .tolerances import INFLUENCE

WIDTHS = ("dim", "d_model", "embed_dim", "hidden_size", "hidden_dim", "channels", "n_embd", "width")
LENGTHS = ("max_len", "max_seqlen", "max_seq_len", "seq_len", "sequence_length", "block_size")
MASKS = ("key_mask", "key_padding_mask", "mask")


class PlainSubject(Subject):
    """A module with its own constructor and forward; width and length are read from its options."""

    @property
    def length(self) -> int:
        """LENGTH, or less where an option says that sequences are shorter."""
        known = [self.options[n] for n in LENGTHS if isinstance(self.options.get(n), int)]
        return min([10, *known])

    def raw(self, **overrides: object) -> nn.Module:
        """Build the module; the width goes to the first argument that has neither a default nor an option."""
        options = {**self.options, **overrides}
        for parameter in list(inspect.signature(self.cls.__init__).parameters.values())[1:]:
            bare = parameter.default is parameter.empty and parameter.kind in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            )
            if parameter.name not in options and (
                parameter.name in WIDTHS or (bare and not set(options) & set(WIDTHS))
            ):
                options[parameter.name] = self.dim
                break
        return self.cls(**options)

    @property
    def mask_name(self) -> str | None:
        """The keyword of forward that takes a mask of keys, if any."""
        known = inspect.signature(self.cls.forward).parameters
        return next((n for n in MASKS if n in known), None)


def plain_subject(cls: type[nn.Module], options: Options, *, dim: int, seed: int, **more: Any) -> PlainSubject:
    """Build a PlainSubject whose width is the one its options name, or ``dim``."""
    width = next((options[n] for n in WIDTHS if isinstance(options.get(n), int)), dim)
    return PlainSubject(cls, options, dim=width, seed=seed, **more)


def mask_hides_padding(s: Subject) -> None:
    """Tokens hidden by the mask do not change the outputs of the others.

    True means hidden in key_padding_mask and attended in key_mask; ``mask`` may mean either.
    """
    assert isinstance(s, PlainSubject)
    name = s.mask_name
    if name is None:
        raise NotApplicable(f"forward takes none of {', '.join(MASKS)}")
    readings = {"key_mask": (True,), "key_padding_mask": (False,), "mask": (True, False)}[name]
    for i, attended in enumerate(readings):
        if i == len(readings) - 1:
            return _check_masks(s, name, attended)
        try:
            with collect_failures(None):
                return _check_masks(s, name, attended)
        except Broken:
            continue
    return None


def _check_masks(s: PlainSubject, name: str, attended: bool) -> None:
    mixer, x = s.build(), s.x()
    for side, keep in inputs.key_masks(s.length).items():
        given = {name: keep if attended else ~keep}
        want = _output_of(mixer(x, **given))
        for size in (1.0, 1e4):
            other = torch.where(keep[..., None], x, size * s.x(stream=3))
            got = _output_of(mixer(other, **given))
            same(
                got,
                want,
                f"padding reaches the output through {name}",
                tol=INFLUENCE,
                live=keep,
                start=0,
                padding=side,
                size=size,
                seed=s.seed,
                kept=keep,
            )


def any_length(s: Subject) -> None:
    """Sequences of every shorter length work."""
    mixer = s.build()
    for n in range(1, s.length):
        try:
            y = _output_of(mixer(s.x(2, n)))
        except Exception as error:
            fail(
                f"a sequence of {n} tokens raises {type(error).__name__}: {str(error).splitlines()[0][:100]}",
                x=s.x(2, n),
            )
        if y.shape != (2, n, s.dim):
            fail(f"gives {tuple(y.shape)}", x=s.x(2, n))


def same_twice(s: Subject) -> None:
    """In eval mode the same input gives the same output: no noise, and no state left behind."""
    mixer, x = s.build(), s.x()
    want = _output_of(mixer(x)).detach().clone()
    _output_of(mixer(s.x(stream=3)))
    same(
        _output_of(mixer(x)), want, "the second call on one input differs from the first", tol=0.0, start=0, seed=s.seed
    )


def must_be_module(cls: object) -> type[nn.Module]:
    """Return the class, or refuse it if it is not a module."""
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise MixerError(f"check: {cls!r} is not a subclass of torch.nn.Module.")
    return cls
