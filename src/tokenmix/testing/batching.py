"""Promises on batches, lengths and memory layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import MixerError
from ..types import Options
from . import inputs
from .report import NotApplicable, fail, finite, same
from .subject import Subject, is_mixer


def _output_of(value: Any) -> Tensor:
    """Return the output of a module that may return more."""
    return value if isinstance(value, Tensor) else value[0]


def keeps_shape(s: Subject) -> None:
    """The output has the shape (B, T, D) and the dtype of the input and is finite."""
    for dtype in (torch.float32, torch.float64):
        mixer, x = s.build(dtype=dtype), s.x(3, dtype=dtype)
        y = _output_of(s.call(mixer, x))
        if y.shape != x.shape or y.dtype != x.dtype:
            fail(f"gives {y.dtype} {tuple(y.shape)}", x=x)
        finite(y, "output", x=x, seed=s.seed)


def rows_are_independent(s: Subject) -> None:
    """No row of the batch depends on the contents of any other row."""
    for dtype in (torch.float64, torch.float32):
        mixer, x = s.build(dtype=dtype), s.x(3, dtype=dtype)
        want = _output_of(s.call(mixer, x))
        for row in range(3):
            shown: Options = {"row": row, "dtype": dtype, "seed": s.seed, "x": x}
            same(
                _output_of(s.call(mixer, x[row : row + 1]))[0],
                want[row],
                "a row alone is not the row in the batch",
                **shown,
            )
            for size in (1.0, 1e4):
                other = size * s.x(3, stream=3, dtype=dtype)
                other[row] = x[row]
                same(
                    _output_of(s.call(mixer, other))[row],
                    want[row],
                    f"other rows of size {size:g} change a row",
                    **shown,
                )
    if is_mixer(s.cls):
        mask = torch.cat([inputs.key_masks(s.length)["mixed"], inputs.key_masks(s.length)["left"]])
        mixer, x = s.build(), s.x(4)
        want = s.call(mixer, x, key_mask=mask)
        for row in range(4):
            got = s.call(mixer, x[row : row + 1], key_mask=mask[row : row + 1])
            same(
                got[0], want[row], "a masked row alone is not the row in the batch", row=row, seed=s.seed, key_mask=mask
            )


def empty_batch(s: Subject) -> None:
    """A batch of no rows gives an output of no rows."""
    mixer = s.build()
    y = _output_of(s.call(mixer, s.x()[:0]))
    if y.shape != (0, s.length, s.dim):
        fail(f"gives {tuple(y.shape)}", x=s.x()[:0])


def one_token(s: Subject) -> None:
    """A sequence of one token works and equals the longer sequence with all other tokens masked."""
    mixer, x = s.build(), s.x()
    if s.grid is not None:
        small = (1,) * len(s.grid)
        y = mixer(x[:, : s.prefix + 1], grid=small, prefix=s.prefix)
        finite(y, "output", x=x[:, : s.prefix + 1], grid=small)
        return
    y = _output_of(mixer(x[:, :1]))
    if y.shape != (2, 1, s.dim):
        fail(f"gives {tuple(y.shape)}", x=x[:, :1])
    finite(y, "output", x=x[:, :1], seed=s.seed)
    if is_mixer(s.cls):
        for at in (0, s.length // 2, s.length - 1):
            mask = (torch.arange(s.length) == at).expand(2, s.length)
            got = mixer(x, key_mask=mask)[:, at]
            same(
                got,
                mixer(x[:, at : at + 1])[:, 0],
                "one token is not the sequence with all others masked",
                seed=s.seed,
                key_mask=mask,
            )


def any_strides(s: Subject) -> None:
    """Non-contiguous, channels-first and expanded inputs give the same numbers and are not written to."""
    mixer, x = s.build(), s.x()
    want = _output_of(s.call(mixer, x.clone()))
    wide = torch.zeros(2, s.length, 2 * s.dim, dtype=x.dtype)
    wide[..., ::2] = x
    tall = torch.zeros(2, 3 * s.length, s.dim, dtype=x.dtype)
    tall[:, ::3] = x
    layouts = {
        "channels first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "time first": x.transpose(0, 1).contiguous().transpose(0, 1),
        "every second feature": wide[..., ::2],
        "every third token": tall[:, ::3],
    }
    for name, view in layouts.items():
        before = view.clone()
        same(
            _output_of(s.call(mixer, view)),
            want,
            f"{name}: strides change the output",
            start=0,
            strides=view.stride(),
            seed=s.seed,
        )
        if not torch.equal(view, before):
            fail(f"{name}: forward writes to its input", seed=s.seed)
    one = x[:1].expand(3, -1, -1)
    same(
        _output_of(s.call(mixer, one)),
        want[:1].expand(3, -1, -1),
        "an expanded batch changes the output",
        strides=one.stride(),
        seed=s.seed,
    )


def packed_equals_separate(s: Subject) -> None:
    """forward_packed gives each sequence the output it has alone, sequences of length zero included."""
    mixer = s.build()
    if s.grid is not None and len(s.grid) > 1:
        try:
            mixer.forward_packed(s.x(1)[0], torch.tensor([0, s.length], dtype=torch.int32))
        except MixerError as error:
            raise NotApplicable("mixes grids; packing is refused") from error
        fail("forward_packed of a mixer on grids neither works nor raises MixerError")
    for lengths in ([3, 0, s.length, 1], [0, 0], [], [2], [0, 4, 0]):
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        x = s.x(1, sum(lengths))[0]
        got = mixer.forward_packed(x, ends)
        if got.shape != x.shape:
            fail(f"forward_packed gives {tuple(got.shape)}", x=x, cu_seqlens=ends)
        for a, b in zip(ends.tolist(), ends.tolist()[1:], strict=False):
            if b > a:
                same(
                    got[a:b],
                    mixer(x[None, a:b])[0],
                    "a packed sequence is not the sequence alone",
                    cu_seqlens=ends,
                    seed=s.seed,
                )
