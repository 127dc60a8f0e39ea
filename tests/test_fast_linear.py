"""The faster linear layer: chosen by measuring, never at the price of rounding unasked, and undone afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tokenmix
from tokenmix.errors import MixerError
from tokenmix.kernels import fast_linear as module

SMALL = {"tokens": 64, "features": 32}


def products(monkeypatch, *, faster: bool, rounds: bool) -> SimpleNamespace:
    """A machine whose other route is faster or not, and rounds to bfloat16 or not."""
    setting = SimpleNamespace(fp32_precision="none")
    taken = {"none": 2.0, "bf16": 1.0 if faster else 3.0}
    now = [0.0]

    def computed(x, w, g):
        if x.dtype == torch.float32:
            now[0] += taken[setting.fp32_precision]
            if rounds and setting.fp32_precision == "bf16":
                x, w, g = (a.bfloat16().float() for a in (x, w, g))
        return x @ w.mT, g @ w, g.mT @ x

    monkeypatch.setattr(module, "_matmul_setting", lambda: setting)
    monkeypatch.setattr(module, "_products", computed)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    return setting


@pytest.mark.parametrize(
    ("faster", "rounds", "allow", "used"),
    [
        (True, False, False, "oneDNN"),
        (True, True, False, "usual"),
        (True, True, True, "oneDNN"),
        (False, False, True, "usual"),
    ],
)
def test_the_faster_exact_route_is_used_inside_the_block_only(monkeypatch, faster, rounds, allow, used):
    setting = products(monkeypatch, faster=faster, rounds=rounds)
    with module.fast_linear(allow_rounding=allow, **SMALL) as found:
        assert (found.used, setting.fp32_precision) == (used, "bf16" if used == "oneDNN" else "none")
        assert (found.other_error > 1e-4) == rounds
        assert used in str(found)
    assert setting.fp32_precision == "none"


def test_products_inside_are_those_of_float32():
    torch.manual_seed(0)
    x, w = torch.randn(64, 128), torch.randn(96, 128)
    with tokenmix.fast_linear(**SMALL):
        got = torch.nn.functional.linear(x, w)
    want = torch.nn.functional.linear(x.double(), w.double())
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


def test_an_error_inside_undoes_it_too(monkeypatch):
    setting = products(monkeypatch, faster=True, rounds=False)
    with pytest.raises(KeyError), module.fast_linear(**SMALL):
        raise KeyError
    assert setting.fp32_precision == "none"


def test_without_the_switch_nothing_changes(monkeypatch):
    monkeypatch.setattr(module, "_matmul_setting", lambda: None)
    with module.fast_linear() as found:
        assert found.used == "usual"
        assert "no oneDNN" in found.why


def test_sizes_are_checked():
    with pytest.raises(MixerError, match="positive, got 0 and 512"), module.fast_linear(tokens=0):
        pass
