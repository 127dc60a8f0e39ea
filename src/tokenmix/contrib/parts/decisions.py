"""Parts of mixers with discrete decisions: accurate projections, decisions that can be frozen, and seeded buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.precision import is_autocast_on
from ...mixers.base import Mixer
from ...mixers.parts.weights_on_call import child_weights


def check_seed(mixer: Any, seed: Any) -> None:
    """Refuse a seed that is neither an integer nor None."""
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        mixer.refuse(f"seed must be an integer, or None to draw from torch's generator, got {seed!r}")


def project_wide(mixer: Mixer, x: Tensor) -> Tensor:
    """Return the queries in float32 or better, under autocast too.

    Decisions taken from rounded numbers could differ.
    """
    weights = child_weights(mixer, mixer.get_submodule("q_proj"), x)
    wide = torch.promote_types(torch.promote_types(x.dtype, weights[0].dtype), torch.float32)
    if not is_autocast_on(x.device.type):
        return F.linear(x.to(wide), *(a.to(wide) for a in weights))
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(wide), *(a.to(wide) for a in weights))


def draw_directions(buffer: Tensor, seed: int | None) -> None:
    """Fill a buffer with N(0, 1), drawn from ``seed`` or, if it is None, from torch's generator.

    The numbers are rounded to bfloat16, so that decisions do not depend on the dtype.
    """
    with torch.no_grad():
        if seed is None:
            buffer.normal_()
        else:
            generator = torch.Generator(device="cpu").manual_seed(seed)
            buffer.copy_(torch.randn(buffer.shape, generator=generator, device="cpu"))
        buffer.copy_(buffer.to(torch.bfloat16))


def decide(mixer: Any, compute: Callable[[], Tensor]) -> Tensor:
    """Return the decisions of this call; inside of ``freeze_decisions``, those of its first call."""
    if mixer._decided is None:
        return compute()
    if not mixer._decided:
        mixer._decided.append(compute())
    return mixer._decided[0]


@contextmanager
def freeze_decisions(mixer: Any) -> Iterator[None]:
    """Reuse the decisions of the first call inside the block for all later calls.

    The output can then be differentiated numerically.
    """
    before, mixer._decided = mixer._decided, []
    try:
        yield
    finally:
        mixer._decided = before
