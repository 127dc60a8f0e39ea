"""Test that torch's default dtype and device decide nothing: what C and Triton read or write states both."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import tokenmix
from tokenmix import functional
from tokenmix.models import LM, LMConfig
from tokenmix.testing import perturb
from tokenmix.testing.defaults import default_dtype

FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "eye", "linspace", "rand", "randn"}
FACTORIES |= {"randint", "randperm", "empty_strided", "scalar_tensor", "tril_indices", "triu_indices"}
KERNELS = Path(tokenmix.__file__).parent / "kernels"


def unsaid(source: str) -> list[str]:
    """The calls of torch's factories that leave the dtype or the device to torch's default."""
    calls = [c for c in ast.walk(ast.parse(source)) if isinstance(c, ast.Call)]
    made = [c for c in calls if ast.unparse(c.func) in {f"torch.{name}" for name in FACTORIES}]
    return [ast.unparse(c) for c in made if not {"dtype", "device"} <= {keyword.arg for keyword in c.keywords}]


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda p: str(p.relative_to(KERNELS)))
def test_kernels_say_dtype_and_device(path):
    assert unsaid(path.read_text()) == []


def test_what_is_unsaid_is_noticed():
    assert len(unsaid("import torch\na = torch.empty(3)\nb = torch.zeros(1, dtype=torch.int32)")) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["aft_full", "aft_local", "aft_conv"])
def test_long_calls_under_another_default(name, dtype):
    """Blocks of rows are longer than any buffer of a short call; all of these routes have buffers of their own."""
    options = {"aft_full": {"max_len": 600}, "aft_local": {"max_len": 600, "window": 70}}.get(
        name, {"heads": 2, "ndim": 2, "kernel_size": 3}
    )
    given = {"grid": (20, 30)} if name == "aft_conv" else {}
    torch.manual_seed(0)
    mixer, x = perturb(tokenmix.build_mixer(name, 16, **options), seed=0), torch.randn(2, 600, 16)
    bad = x.index_fill(1, torch.tensor([599]), float("nan"))

    def outcome():
        leaf = x.clone().requires_grad_()
        y = mixer(leaf, **given)
        return y.detach(), *torch.autograd.grad(y.sum(), [leaf, *mixer.parameters()]), mixer(bad, **given).isnan()

    want = outcome()
    with default_dtype(dtype), torch.device("meta"):
        got = outcome()
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_wide_log_weights_under_another_default():
    """AFT-conv on grids leaves log-weights that span much to torch, in float64."""
    kernel = torch.tensor([-50.0, 0.0, 50.0]).expand(2, 3, 3).contiguous().requires_grad_()
    q, v = torch.randn(2, 2, 12, 8)
    k = torch.randn(2, 12, 2)

    def outcome():
        y = functional.aft_conv(q, k, v, kernel, causal=False, grid=(3, 4), backend="cpu")
        return y.detach(), *torch.autograd.grad(y.sum(), kernel)

    want = outcome()
    with default_dtype(torch.bfloat16), torch.device("meta"):
        got = outcome()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_generates_the_same_under_another_default(dtype):
    torch.manual_seed(0)
    model = LM(
        LMConfig(dim=16, max_len=40, vocab=11, mixers=({"name": "aft_forget"}, {"name": "aft_pairs", "heads": 2}))
    )
    prompt = torch.randint(0, 11, (2, 5))
    want = model.eval().generate(prompt, 6, seed=0)
    with default_dtype(dtype), torch.device("meta"):
        assert torch.equal(model.generate(prompt, 6, seed=0), want)
