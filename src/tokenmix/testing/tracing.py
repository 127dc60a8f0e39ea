"""The promise on torch.jit.trace: a program is right at every length, or raises."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..export.inputs import silence_exporters
from ..types import Options
from . import inputs
from .report import fail, same
from .subject import Subject

LONG = 70  # beyond the blocks that causal sums are cut into
REFUSED = ("was traced at", "was built with")


class _Placed(nn.Module):
    """A mixer that is called with a mask, and with its grid."""

    def __init__(self, mixer: nn.Module, place: Options):
        super().__init__()
        self.mixer, self.place = mixer, place

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        return self.mixer(x, key_mask=key_mask, **self.place)


def right_or_refused_when_traced(s: Subject) -> None:
    """A program of ``torch.jit.trace`` is right at other batches and lengths than its own, or refuses them in one line.

    It refuses lengths only where the layer says that it is ``fixed_when_traced``, works on a grid, or refuses them too.
    """
    mixer = s.build(dtype=torch.float32, **s.options_for_length(LONG + 2))
    T, fixed = s.length, mixer.facts.has_fixed_length(mixer.causal)
    calls = [(3, T), (2, max(1, T - 3)), (2, T + 1), (2, LONG), (1, LONG + 3)]
    for masked in (False, True):
        with silence_exporters(), torch.no_grad():
            example = _input(s, 2, T, 0, masked)
            program = torch.jit.trace(_Placed(mixer, s.place()), example, check_trace=False)
            for rows, length in calls:
                given = _input(s, rows, length, 3, masked)
                shown: Options = {"traced": T, "called": length, "rows": rows, "masked": masked, "seed": s.seed}
                try:
                    want = _Placed(mixer, s.place())(*given)
                except MixerError:
                    want = None
                try:
                    got = program(*given)
                except (RuntimeError, torch.jit.Error) as why:
                    line = str(why).strip().splitlines()[-1]
                    if not any(said in line for said in REFUSED):
                        fail(f"a traced program raises {line!r}", **shown)
                    if want is not None and (length == T or not fixed):
                        fail(f"a traced program refuses what the layer takes: {line!r}", **shown)
                    continue
                if want is None:
                    fail("a traced program gives numbers where the layer refuses", **shown)
                live = given[1] if masked else torch.ones(rows, length, dtype=torch.bool)
                same(got[live], want[live], "a traced program gives other numbers", tol=1e-4, **shown)


def _input(s: Subject, rows: int, length: int, stream: int, masked: bool) -> tuple[Tensor, ...]:
    x = s.x(rows, length, stream=stream, dtype=torch.float32)
    return (x, inputs.key_masks(length)["left"][:1].expand(rows, length).contiguous()) if masked else (x,)
