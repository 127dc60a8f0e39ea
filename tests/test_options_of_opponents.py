"""Options of the wrong kind or size: built and working, or refused with one MixerError that names the mixer and the option; never a traceback of torch's."""

from __future__ import annotations

import inspect

import pytest
import torch

from cases import CASES, GRIDS
from tokenmix import MIXERS, MixerError
from tokenmix.mixers import CORE

WRONG = [None, -1, 0, 1.5, "x", True, float("nan"), [], [0], {}, [2, "x"], -1.0]
OPPONENTS = [case for case, (name, _) in CASES.items() if name not in CORE]


@pytest.mark.parametrize("case", OPPONENTS)
def test_wrong_options_are_refused_in_one_line(case):
    name, options = CASES[case]
    cls, (grid, prefix) = MIXERS[name], GRIDS.get(case, (None, 0))
    for option in list(inspect.signature(cls.__init__).parameters)[2:]:
        for wrong in WRONG:
            if option == "causal" or (option == "max_len" and wrong is True):
                continue
            try:
                mixer = cls(8, **{**options, option: wrong})
                place = {"grid": grid, "prefix": prefix} if grid and mixer.capabilities.grid else {}
                T = prefix + torch.Size(grid).numel() if place else min(10, mixer.max_len or 10)
                assert mixer(torch.randn(2, T, 8), **place).isfinite().all()
            except MixerError as error:
                text = str(error)
            except Exception as error:
                pytest.fail(f"{option}={wrong!r}: {type(error).__name__}: {error}")
            else:
                continue
            said = [cls.__name__ in text, "\n" not in text, option in text or "heads" in text]
            assert all(said), f"{option}={wrong!r}: {text}"
