"""Promises on segments: stretches read apart and composed in any bracketing are the sequence."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import MixerError
from ..mixers import State
from ..mixers.segments import Halo, Segment, Segmented, newest_halo
from ..types import Options
from . import inputs
from .report import NotApplicable, fail, same
from .subject import Subject, gradients


def _build_segmented(s: Subject) -> Segmented:
    mixer = s.build()
    if not mixer.capabilities.streaming:
        raise NotApplicable("does not stream a sequence")
    if not mixer.capabilities.segments:
        try:
            mixer.segment(s.x())
        except (MixerError, AttributeError) as error:
            raise NotApplicable("has no segments; asking for one is refused") from error
        fail("says it has no segments, but segment raises no MixerError")
    return mixer


def halo_at(mixer: Segmented, x: Tensor, at: int, key_mask: Tensor | None, positions: Tensor | None) -> Halo | None:
    """Return the tokens before index ``at`` that ``mixer.segment`` has to be given, or None."""
    if not mixer.halo:
        return None
    index = torch.arange(-mixer.halo, at).expand(x.shape[0], -1) - at
    x = torch.cat([x.new_zeros(x.shape[0], mixer.halo, x.shape[2]), x[:, :at]], 1)
    valid = torch.ones(x.shape[0], at, dtype=torch.bool) if key_mask is None else key_mask[:, :at]
    valid = torch.cat([torch.zeros_like(index[:, : mixer.halo], dtype=torch.bool), valid], 1)
    if positions is not None:
        index = torch.cat([torch.zeros_like(index[:, : mixer.halo]), positions[:, :at]], 1)
    return newest_halo(x, valid, index, size=mixer.halo)


def segments_of(mixer: Segmented, x: Tensor, cuts: tuple[int, ...], **given: Tensor | None) -> list[Segment]:
    """Return the segments of x between neighbouring cuts."""
    found = []
    for start, stop in pairwise(cuts):
        part = {k: None if v is None else v[:, start:stop] for k, v in given.items()}
        halo = halo_at(mixer, x, start, given.get("key_mask"), given.get("positions"))
        found.append(mixer.segment(x[:, start:stop], halo=halo, **part))
    return found


def _from_left(parts: list[Segment]) -> Segment:
    total = parts[0]
    for part in parts[1:]:
        total = total.then(part)
    return total


def _from_right(parts: list[Segment]) -> Segment:
    return parts[0] if len(parts) == 1 else parts[0].then(_from_right(parts[1:]))


def _in_halves(parts: list[Segment]) -> Segment:
    half = len(parts) // 2
    return parts[0] if len(parts) == 1 else _in_halves(parts[:half]).then(_in_halves(parts[half:]))


BRACKETS: dict[str, Callable[[list[Segment]], Segment]] = {
    "from the left": _from_left,
    "from the right": _from_right,
    "in halves": _in_halves,
}


def segments_compose(s: Subject) -> None:
    """Segments of any cuts, composed in any bracketing, give the state of streaming, with masks and positions too."""
    mixer, x, T = _build_segmented(s), s.x(), s.length
    masks = inputs.key_masks(T)
    late = torch.ones(2, T, dtype=torch.bool)
    late[0, : T // 2] = False
    given: list[Options] = [{}, *({"key_mask": m} for m in (masks["left"], masks["holes"], late))]
    given.append({"positions": inputs.increasing_positions(2, T, s.limit(mixer), seed=s.seed)})
    a, b = max(1, T // 3), 2 * T // 3
    for each in given:
        live, want = each.get("key_mask", torch.ones(2, T, dtype=torch.bool)), mixer(x, **each)
        for cuts in ((0, a, a, a + 1, b), tuple(range(b + 1))):
            parts = segments_of(mixer, x, cuts, **each)
            for name, bracket in BRACKETS.items():
                _continues(
                    s, mixer, x, bracket(parts).after(mixer.init_state(2)), want, live, b, each, f"{cuts}, {name}"
                )
        _, state = mixer.extend(x[:, :a], mixer.init_state(2), **{k: v[:, :a] for k, v in each.items()})
        part = segments_of(mixer, x, (a, b), **each)[0]
        _continues(s, mixer, x, part.after(state), want, live, b, each, f"{(a, b)} after a stream")


def _continues(
    s: Subject,
    mixer: Segmented,
    x: Tensor,
    state: State,
    want: Tensor,
    live: Tensor,
    at: int,
    given: Options,
    how: str,
) -> None:
    got = mixer.extend(x[:, at:], state, **{k: v[:, at:] for k, v in given.items()})[0]
    same(
        got,
        want[:, at:],
        "a state of composed segments does not continue as the whole sequence",
        live=live[:, at:],
        start=at,
        cuts=how,
        seed=s.seed,
        **given,
    )


def gradients_of_segments(s: Subject) -> None:
    """The gradients through composed segments, with regard to x and every parameter, are those of the parallel form."""
    mixer, T = _build_segmented(s), s.length
    leaves = {"x": s.x().requires_grad_(), **{n: p for n, p in mixer.named_parameters() if p.requires_grad}}
    holes = inputs.key_masks(T)["holes"]
    a, b = max(1, T // 3), 2 * T // 3
    weight = inputs.noise(2, T - b, s.dim, seed=s.seed + 5, dtype=leaves["x"].dtype) * holes[:, b:, None]
    want = gradients((mixer(leaves["x"], key_mask=holes)[:, b:] * weight).sum(), leaves)
    parts = segments_of(mixer, leaves["x"], (0, a, a + 1, b), key_mask=holes)
    state = _in_halves(parts).after(mixer.init_state(2))
    got = gradients((mixer.extend(leaves["x"][:, b:], state, key_mask=holes[:, b:])[0] * weight).sum(), leaves)
    scale = max(float(g.abs().max()) for g in want.values())
    for leaf in leaves:
        same(
            got[leaf],
            want[leaf],
            f"the gradient of {leaf} through segments is not the parallel form's",
            scale=scale,
            of="the largest gradient",
            seed=s.seed,
            key_mask=holes,
        )
