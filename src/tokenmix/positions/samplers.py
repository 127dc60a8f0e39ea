"""Other positions while a model trains, so that it has seen those of longer sequences.

Each sampler maps the positions of a batch to others that still rise along each row. Models apply it in training only.
The samplers in ``SAMPLERS`` draw integers below ``longest``; "cape" draws numbers, which only sinusoids can take.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import MixerError
from ..system.config import nearest
from ..types import Options
from .checks import is_whole, number

Sampler = Callable[[Tensor, int], Tensor]


def offset(positions: Tensor, longest: int) -> Tensor:
    """Shift each row by one number, drawn evenly from those that keep it below ``longest`` (SHAPE, Kiyono et al. 2021,
    arXiv 2109.05644)."""
    free = longest - positions.shape[1]
    return positions + torch.randint(free + 1, (len(positions), 1), device=positions.device)


def draw_subset(positions: Tensor, longest: int) -> Tensor:
    """Give each row a sorted subset of 0 .. longest - 1, drawn evenly, without repetition (Ruoss et al. 2023,
    arXiv 2305.16843)."""
    numbers = torch.rand(len(positions), longest, dtype=torch.float32, device=positions.device)
    return numbers.argsort(1)[:, : positions.shape[1]].sort(1).values.gather(1, positions)


def pose(positions: Tensor, longest: int) -> Tensor:
    """Cut each row into two parts at an even place and skip positions between them (PoSE, Zhu et al. 2023,
    arXiv 2309.10400).

    The first part begins at 0, as in a prompt; the second is shifted by a number drawn evenly from those that keep it
    below ``longest``. Zhu et al. shift the text along with the positions, which is left out: text here is drawn anew.
    """
    shape, device = (len(positions), 1), positions.device
    cut = torch.randint(1, max(positions.shape[1], 2), shape, device=device)
    skip = torch.randint(longest - positions.shape[1] + 1, shape, device=device)
    return torch.where(positions >= cut, positions + skip, positions)


SAMPLERS: dict[str, Sampler] = {"offset": offset, "randomised": draw_subset, "pose": pose}
CAPE = {"global_shift": 0, "local_shift": 0, "scale": 1}
"""The options of "cape", and the least value of each, with which it changes nothing."""


def jitter_positions(positions: Tensor, *, global_shift: float, local_shift: float, scale: float) -> Tensor:
    """Map positions to numbers: (t + a + e_t) c, with a and c drawn for each row and e_t for each token (CAPE,
    Likhomanenko et al. 2021, arXiv 2106.03143, Sec. 4).

    a is uniform within ``global_shift`` of 0, e_t within ``local_shift``, and log c within log ``scale``. With a
    ``local_shift`` of at most 0.5 the positions still rise.
    """
    like = positions.double()
    a, c = (torch.rand_like(like[:, :1]) * 2 - 1 for _ in range(2))
    e = torch.rand_like(like) * 2 - 1
    return (like + a * global_shift + e * local_shift) * (c * math.log(scale)).exp()


def check_sampler(spec: object, max_len: int | None, added: object, who: str) -> None:
    """Raise an error for an unknown sampler, or one beyond the length of the model.

    Args:
        spec: None, or an object such as ``{"name": "offset", "longest": 512}``: positions stay below ``longest``.
        max_len: longest sequence of the model; None: it has none.
        added: the spec of what the model adds to its embedding.
        who: named in errors.
    """
    if spec is None:
        return
    if isinstance(spec, dict) and spec.get("name") == "cape":
        _check_cape(spec, added, who)
        return
    if not isinstance(spec, dict) or set(spec) != {"name", "longest"} or not is_whole(spec["longest"], 1):
        raise MixerError(f'{who}: sample_positions must be like {{"name": "offset", "longest": 512}}, got {spec!r}.')
    if spec["name"] not in SAMPLERS:
        raise MixerError(
            f"{who}: there is no sampler {spec['name']!r}; {nearest(str(spec['name']), (*SAMPLERS, 'cape'))}."
        )
    if max_len is not None and spec["longest"] > max_len:
        raise MixerError(
            f"{who}: sample_positions would draw positions up to {spec['longest'] - 1}, but the model has "
            + f"max_len={max_len}; give a larger one."
        )


def _check_cape(spec: Options, added: object, who: str) -> None:
    options = {name: value for name, value in spec.items() if name != "name"}
    fits = set(options) == set(CAPE) and all(number(options[name]) and options[name] >= CAPE[name] for name in CAPE)
    if not fits or options["local_shift"] > 0.5:
        needs = "global_shift >= 0, 0 <= local_shift <= 0.5 and scale >= 1"
        raise MixerError(f"{who}: sample_positions 'cape' takes the numbers {needs}, got {spec!r}.")
    if (added.get("name") if isinstance(added, dict) else added) != "sinusoidal":
        raise MixerError(
            f"{who}: sample_positions 'cape' draws positions that are no integers, which positions='sinusoidal' can "
            + f"take and positions={added!r} cannot."
        )


def sample_positions(spec: Options, positions: Tensor, who: str) -> Tensor:
    """Return the positions (B, T) that a sampler draws in place of ``positions``, which count from 0.

    They are integers, but float64 for "cape". It draws from torch's generator of the device.

    Raises:
        MixerError: for more tokens than the sampler has positions.
    """
    if spec["name"] == "cape":
        return jitter_positions(positions, **{name: spec[name] for name in CAPE})
    if positions.shape[1] > spec["longest"]:
        raise MixerError(f"{who}: sample_positions has longest={spec['longest']}, got {positions.shape[1]} tokens.")
    return SAMPLERS[spec["name"]](positions, spec["longest"])
