"""Test the Triton kernels on the tensor cores without a GPU.

In the interpreter against the float64 reference, and compiled ahead of time for sm_80 and sm_90.
"""

from __future__ import annotations

import pytest

from triton_process import HERE, run

CHECKS = ("full_shapes", "full_masks", "full_adversarial", "band_shapes", "band_masks", "band_adversarial")
# The products of matrices; `slow` compiles all.
TYPICAL = r"bfloat16 causal( local| conv mask)?: (row|key|pair|band)_(sums|rows|keys|pairs)$"


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check):
    run(str(HERE / "triton_gemm_checks.py"), check, TRITON_INTERPRET="1")


def test_compiles_with_matrix_instructions():
    report = run("-m", "tokenmix.kernels.triton.aot", "--only", "aft_full", "aft_band", "--keep", TYPICAL)
    assert " 80 " in report
    assert " 90 " in report


def test_every_kernel_compiles():
    report = run(
        "-m", "tokenmix.kernels.triton.aot", "--only", "aft_full", "aft_band", "--fullest"
    )  # one of float32 and one of bfloat16 of each
    assert " 80 " in report
    assert " 90 " in report


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("module", ["aft_full", "aft_band"])
@pytest.mark.parametrize("arch", ["80", "90"])  # apart, so that two workers share them
def test_every_configuration_compiles(module, arch):
    run("-m", "tokenmix.kernels.triton.aot", "--arch", arch, "--only", module)
