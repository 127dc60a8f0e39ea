"""Test the Triton kernels without a GPU.

In the interpreter against the float64 eager form, and compiled ahead of time for sm_80 and sm_90.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from test_triton_gemm import CHECKS as GEMM_CHECKS
from triton_process import HERE, run

SECOND = "3.6.0"  # the oldest triton the kernels are kept working on
CHECKS = (  # those of a row run in one process
    "scan_adversarial",
    "scan_shapes scan_operator scan_does_not_drift",
    "scan_masks scan_packed scan_nonfinite",
    "others_nonfinite",
    "hydra_all",
    "forget_all",
    "forget_masks forget_nonfinite forget_operator",
    "linear_adversarial",
    "linear_shapes",
    "linear_masks linear_jumps",
    "linear_large linear_does_not_drift linear_operator",
)


@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check):
    run(str(HERE / "triton_checks.py"), *check.split(), TRITON_INTERPRET="1")


def test_every_kernel_compiles():
    """One of float32 and one of bfloat16 of each, for sm_90; ``slow`` compiles all, for sm_80 too."""
    modules = ("aft_forget", "aft_simple", "hydra", "linear")
    report = run("-m", "tokenmix.kernels.triton.aot", "--arch", "90", "--only", *modules, "--fullest")
    assert " 90 " in report


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("module", ["aft_forget", "aft_simple", "hydra", "linear"])
@pytest.mark.parametrize("arch", ["80", "90"])  # apart, so that two workers share them
def test_every_configuration_compiles(module, arch):
    run("-m", "tokenmix.kernels.triton.aot", "--arch", arch, "--only", module)


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> str:
    """The folder of another Triton."""
    folder = str(tmp_path_factory.mktemp("triton"))
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", folder, f"triton=={SECOND}"], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_second_triton_compiles(second):
    """The largest configuration of each kernel; all would take an hour."""
    report = run("-m", "tokenmix.kernels.triton.aot", "--arch", "80", "90", "--fullest", path=second)
    assert f"triton {SECOND}" in report


@pytest.mark.slow
@pytest.mark.parametrize("check", [*CHECKS, *GEMM_CHECKS])
def test_the_second_triton_in_the_interpreter(second, check):
    checks = "triton_gemm_checks.py" if check in GEMM_CHECKS else "triton_checks.py"
    run(str(HERE / checks), *check.split(), path=second, TRITON_INTERPRET="1")
