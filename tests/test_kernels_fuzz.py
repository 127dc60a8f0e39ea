"""Fuzz every C kernel against the eager form in float64: outputs and gradients.

Random shapes, dtypes, masks, layouts, weights and keys: 500 calls in `make test-more`, over 10,000 marked slow. A
failure names the form and the seed: ``fuzz_forms.check(form, seed)`` repeats it.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fuzz_forms
from fuzz_forms import FORMS, LACKS, MISSING, check
from tokenmix import MixerError
from tokenmix.kernels import cpu
from tokenmix.kernels.cpu import build

HERE = Path(__file__).parent
NAMES = list(build.instruction_sets())  # best first
LESSER = NAMES[NAMES.index(str(cpu.isa())) + 1 :] if cpu.isa() in NAMES else []
PARTS, MORE = 2, 20
EACH = 50  # seeds of a form in make test-more, in this many parts; the sweep has MORE times as many
BLOCKS = [(part * EACH // PARTS, (part + 1) * EACH // PARTS) for part in range(PARTS)]
SWEEP = [pytest.param(EACH * i, EACH * (i + 1), marks=pytest.mark.slow) for i in range(1, MORE + 1)]


def plain(name: str) -> torch.Tensor:
    """A call that the kernel of this form takes, if it has one."""
    for seed in range(1000):
        d = fuzz_forms.Draw(seed)
        args, options = FORMS[name].draw(d)
        if d.B and d.T > 1 and d.S > 1 and d.dtype == torch.float32:
            try:
                return FORMS[name].function(*fuzz_forms.mapped(args, torch.Tensor.float), **options, backend="cpu")
            except MixerError as refusal:
                if not any(part in str(refusal) for part in LACKS.get(name, ())):
                    raise
    raise AssertionError("every call is refused")


@pytest.mark.parametrize(("first", "end"), [*BLOCKS, *SWEEP])
@pytest.mark.parametrize("name", [name for name in FORMS if name not in MISSING])
def test_equals_eager(name, first, end):
    outcomes = {seed: check(name, seed) for seed in range(first, end)}
    for seed, outcome in outcomes.items():
        assert outcome == "same" or any(part in outcome for part in LACKS.get(name, ())), (
            f"{name}, seed {seed}: {outcome}"
        )
    assert list(outcomes.values()).count("same") > len(outcomes) / 5, (
        "most calls are refused"
    )  # of External attention, which has no causal kernel, three in eight run


@pytest.mark.parametrize("isa", LESSER)
def test_the_other_instruction_sets(isa):
    """What a lesser processor runs, half precision included."""
    recurrence = "test_kernels_recurrence.py::test_random_calls[0]"
    tests = ["test_kernels_fuzz.py::test_equals_eager", "test_kernels_aft_simple.py", recurrence]
    few = ["-k", f"{BLOCKS[0][0]}-{BLOCKS[0][1]} or half_precision or random_calls", "-q", "-p", "no:xdist"]
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])
    env = {**os.environ, "TOKENMIX_ISA": isa, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *few, *(str(HERE / t) for t in tests)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert done.stdout.count(".") > len(FORMS), done.stdout


@pytest.mark.parametrize("name", FORMS)
def test_only_the_known_ones_have_no_kernel(name):
    if name in MISSING:
        with pytest.raises(MixerError, match="has no cpu kernel"):
            plain(name)
    else:
        assert plain(name).isfinite().all()


def test_what_a_kernel_lacks_is_really_refused():
    assert set(LACKS) <= set(FORMS) - MISSING
    for name, parts in LACKS.items():
        said = [outcome for seed in range(100) if (outcome := check(name, seed)) != "same"]
        for part in parts:
            assert any(part in outcome for outcome in said), (
                f"{name}: {part!r} is refused no more, take it off the list"
            )


@pytest.mark.parametrize("bug", ["off by 1e-4", "not finite", "a masked key counts", "another gradient"])
@pytest.mark.parametrize("name", FORMS)
def test_the_measure_finds_a_planted_error(name, bug, monkeypatch):
    """A kernel with this bug would be noticed: here the eager form has it."""
    right, seeds = FORMS[name].function, [s for s in range(60) if usual(name, s)][:8]

    @functools.wraps(right)  # which argument is which goes by its name
    def wrong(*args, backend, **options):
        mask = options["key_mask"]
        if backend == "cpu" and bug == "a masked key counts" and mask is not None:
            options["key_mask"] = mask | (torch.arange(mask.shape[1]) == mask.shape[1] // 2)
        y = right(*args, **options, backend="eager")
        if backend == "cpu" and bug == "off by 1e-4":
            return y * (1 + 1e-4)
        if backend == "cpu" and bug == "another gradient":
            return y + 1e-3 * (y - y.detach())
        return torch.where(y == y.max(), float("inf"), y) if backend == "cpu" and bug == "not finite" else y

    monkeypatch.setitem(FORMS, name, FORMS[name]._replace(function=wrong))
    noticed = 0
    for seed in seeds:
        try:
            check(name, seed)
        except AssertionError:
            noticed += 1
    assert noticed >= (2 if bug == "a masked key counts" else len(seeds) // 2)


def usual(name: str, seed: int) -> bool:
    """In float32 and with more than one token; the mask hides some of them."""
    d, _, _, options = fuzz_forms.drawn(name, seed)
    mask = options["key_mask"]
    return (
        d.dtype == torch.float32
        and d.B > 0
        and d.T > 1
        and d.S > 1
        and mask is not None
        and bool(mask.any())
        and not bool(mask.all())
    )
