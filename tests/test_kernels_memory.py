"""Test what the C kernels hold: nothing beside the output in a forward pass of a scan.

For the backward pass they hold at most a third of what the eager form keeps.
"""

from __future__ import annotations

import pytest
import torch

from tokenmix import functional
from tokenmix.kernels import cpu
from tokenmix.lab.bench.timing import peak_memory

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no C library here")
B, T, D = 2, 512, 64
FORMS = {
    "aft_simple": (functional.aft_simple, {}, ()),
    "aft_local": (functional.aft_local, {"window": 32}, ((T, 16), (T, 16))),
    "aft_conv": (functional.aft_conv, {}, ((8, 31),)),
    "aft_conv on a grid": (functional.aft_conv, {"grid": (16, 32)}, ((8, 7, 7),)),
    "aft_full": (functional.aft_full, {}, ((T, 16), (T, 16))),
    "hydra": (functional.hydra, {}, ()),
    "linear_attention": (functional.linear_attention, {"heads": 4}, ()),
}
CASES = [(name, causal) for name in FORMS for causal in (True, False) if not (causal and "grid" in FORMS[name][1])]


def kept(name: str, causal: bool, backend: str) -> int:
    """Bytes of the tensors that autograd holds after a forward pass, without arguments and output."""
    form, options, shapes = FORMS[name]
    keys = shapes[0][0] if name.startswith("aft_conv") else D
    given = [torch.randn(B, T, D), torch.randn(B, T, keys), torch.randn(B, T, D)]
    weights = [torch.randn(shape) * 0.1 for shape in shapes]
    for leaf in [*given, *weights]:
        leaf.requires_grad_()
    own = {a.untyped_storage().data_ptr() for a in [*given, *weights]}
    held: dict[int, int] = {}

    def note(a: torch.Tensor) -> torch.Tensor:
        held[a.untyped_storage().data_ptr()] = a.untyped_storage().nbytes()
        return a

    last = () if not weights else (tuple(weights),) if len(weights) == 2 else (weights[0],)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda a: a):
        y = form(*given, *last, causal=causal, backend=backend, **options)
        return sum(size for at, size in held.items() if at not in own | {y.untyped_storage().data_ptr()})


@pytest.mark.parametrize(("name", "causal"), CASES)
def test_training_keeps_at_most_a_third_of_what_the_eager_form_keeps(name, causal):
    ours, eager = kept(name, causal, "cpu"), kept(name, causal, "eager")
    assert ours <= eager / 3, f"{ours:,} bytes, eager {eager:,}"


@pytest.mark.parametrize("causal", [True, False])
def test_a_scan_keeps_a_twentieth_of_a_tensor(causal):
    assert kept("aft_simple", causal, "cpu") <= B * T * D * 4 * 3 / 64


@pytest.mark.parametrize("name", ["aft_simple", "aft_conv", "hydra"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_forward_pass_takes_the_memory_of_its_output(name, causal):
    form, options, shapes = FORMS[name]
    q, k, v = torch.randn(1, 8192, 512), torch.randn(1, 8192, 8 if shapes else 512), torch.randn(1, 8192, 512)
    args = (q, k, v, *(torch.randn(shape) for shape in shapes))
    taken = peak_memory(lambda: form(*args, causal=causal, backend="cpu", **options))
    if taken is None:
        pytest.skip("this system does not say how much memory a call takes")
    assert taken <= 1.25 * q.nbytes
