"""Test the Triton kernels on the tensor cores without a GPU.

In the interpreter against the float64 reference, and compiled ahead of time for sm_80 and sm_90.
"""

from __future__ import annotations

import pytest

from triton_process import HERE, run

CHECKS = ("full_shapes full_masks full_adversarial", "band_shapes", "band_masks", "band_adversarial")


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check):
    run(str(HERE / "triton_gemm_checks.py"), *check.split(), TRITON_INTERPRET="1")


def test_every_kernel_compiles():
    """One of float32 and one of bfloat16 of each, for sm_90; ``slow`` compiles all, for sm_80 too."""
    report = run("-m", "tokenmix.kernels.triton.aot", "--arch", "90", "--only", "aft_full", "aft_band", "--fullest")
    assert " 90 " in report


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("module", ["aft_full", "aft_band"])
@pytest.mark.parametrize("arch", ["80", "90"])  # apart, so that two workers share them
def test_every_configuration_compiles(module, arch):
    run("-m", "tokenmix.kernels.triton.aot", "--arch", arch, "--only", module)
