"""Test that no kernel reads tensors that do not fit each other: each call with wrong ones is refused in one line."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError
from tokenmix.kernels import cpu
from tokenmix.kernels.operator import OPERATORS
from tokenmix.kernels.shapes import parse_declaration
from tokenmix.kernels.tokenwise import rms_norm, rotate, silu_gate

SIZES = {"B": 2, "T": 6, "S": 6, "R": 6, "D": 8, "h": 8, "H": 8, "W": 1, "L": 3, "s": 3, "e": 8, "m": 2, "C": 2}
OPTIONS = {"T": 6, "causal": True, "of_q": True, "of_k": True, "eps": 1e-5, "mean": False, "grid": [2, 3], "prefix": 0}
OPTIONS |= {"norm": False, "heads": 2, "elu": True, "interleaved": False, "delta": True, "scale": 0.5}
ROW = {"B": 1, "H": 2, "R": 2, "K": 4, "V": 5, "E": 4, "N": 1, "M": 2}  # of recurrence: one document in one row
KEPT = [name for name in OPERATORS if cpu.available() and "cpu" in OPERATORS[name].on]


def call_of(name: str) -> tuple[list[torch.Tensor], list]:
    """Tensors and options that the operator takes."""
    operator, draw = OPERATORS[name], torch.Generator().manual_seed(0)
    sizes = SIZES | ({"H": 2, "R": 2} if name == "aft_pairs" else {"H": 8, "R": 1} if name == "aft_band" else {})
    sizes |= {"h": 8} if name == "aft_conv2d" else ROW if name == "recurrence" else {}
    tensors = []
    for one in operator.each:
        shape = (2, 3)[: one.leads * 2] + tuple(sizes[dim] for dim in one.dims)
        a = torch.randn(shape, generator=draw)
        if one.dtype is torch.int64:  # where documents end
            a = torch.tensor([0, sizes["T"]])
        tensors.append((a > -1).to(one.dtype) if one.dtype in (torch.bool, torch.uint8) else a)
    return tensors, [
        ({"norm": "double"} if name == "external" else {}).get(o, OPTIONS.get(o)) for o in operator.options
    ]


def wrong_ones(tensors: list[torch.Tensor]):
    """The same tensors with one that does not fit."""
    for i, a in enumerate(tensors):
        for axis in range(a.ndim):
            for other in (a.narrow(axis, 0, 1), torch.cat([a, a], axis)):
                yield [*tensors[:i], other, *tensors[i + 1 :]]
        kinds = (torch.float32,) if a.dtype is torch.bool else (torch.float64, torch.int64)
        for other in (*(a.to(kind) for kind in kinds), a[None]):
            yield [*tensors[:i], other, *tensors[i + 1 :]]


@pytest.mark.parametrize("name", KEPT)
def test_forward_takes_only_what_fits(name):
    """Each other size is refused, or computed as the eager form computes it."""
    operator = OPERATORS[name]
    tensors, options = call_of(name)
    refused = []
    for given in (tensors, *wrong_ones(tensors)):
        try:
            found = operator.forward(*given, *options, False)
        except MixerError as why:
            refused.append(str(why))
        else:
            y = found if isinstance(found, torch.Tensor) else found[0]
            torch.testing.assert_close(y, operator.eager(*given, *options), rtol=1e-4, atol=1e-5, check_dtype=False)
    assert len(refused) >= 3
    assert all(line.startswith(name) and "\n" not in line for line in refused)


@pytest.mark.parametrize("name", KEPT)
def test_backward_takes_only_what_forward_gave(name):
    operator = OPERATORS[name]
    tensors, options = call_of(name)
    found = operator.forward(*tensors, *options, True)
    y, *saved = (found,) if isinstance(found, torch.Tensor) else found
    kept = [y, *saved] if operator.keeps_result else saved
    operator.backward(torch.ones_like(y), *tensors, *kept, *options)
    given = [torch.ones_like(y), *kept]
    for i, a in enumerate(given):
        for other in (a[:-1], torch.cat([a, a]), a.double(), a.new_empty(0), a[None]):
            wrong = [*given[:i], other, *given[i + 1 :]]
            with pytest.raises(MixerError, match="_backward"):
                operator.backward(wrong[0], *tensors, *wrong[1:], *options)


def test_a_wrong_number_of_queries_is_refused():
    q, k, v = torch.randn(3, 2, 6, 8)
    for causal in (True, False):
        with pytest.raises(MixerError, match="aft_simple"):
            torch.ops.tokenmix.aft_simple(q, k, v, None, 100_000, causal, False)


def test_options_that_do_not_fit_the_sizes_are_refused():
    q, k, v = torch.randn(3, 2, 6, 8)
    with pytest.raises(MixerError, match="heads=3"):
        torch.ops.tokenmix.linear(q, k, v, None, 3, True, True, False)
    wide = torch.randn(1, 2, 1024)
    with pytest.raises(MixerError, match="heads=1"):
        torch.ops.tokenmix.aft_forget(wide, wide, wide, wide, None, 1, 1e-5, False)
    with pytest.raises(MixerError, match="prefix=1"):
        torch.ops.tokenmix.aft_conv2d(q, k, v, torch.randn(8, 3, 3), None, [2, 3], 1, False)


def test_the_functions_around_them_refuse_too():
    x = torch.randn(2, 3, 4, 8)
    angles = torch.randn(2, 3, 2)
    with pytest.raises(MixerError, match="rotate"):
        rotate(x, angles, angles[:1], backend="cpu")
    with pytest.raises(MixerError, match="rms_norm"):
        rms_norm(x, torch.ones(7), backend="cpu")
    with pytest.raises(MixerError, match="silu_gate"):
        silu_gate(x, x[:1], backend="cpu")


def test_a_declaration_is_read():
    q, w, mask, x = parse_declaration("q?(B,T,D) w(B|1,T):float mask?!(B):bool x(*,D)")
    assert (q.optional, q.differentiable, q.dims, q.same) == (True, True, ("B", "T", "D"), True)
    assert (w.may_be_1, w.same, w.dtype) == ((True, False), False, None)
    assert (mask.differentiable, mask.dtype) == (False, torch.bool)
    assert (x.leads, x.dims) == (True, ("D",))


@pytest.mark.parametrize("name", KEPT)
def test_a_missing_tensor_or_one_elsewhere_is_refused(name):
    """Torch lets None through, and runs an operator with one tensor on meta as if all were there."""
    operator = OPERATORS[name]
    tensors, options = call_of(name)
    for i, one in enumerate(operator.each):
        others = [] if one.optional else [None]
        others += [tensors[i].to("meta")] if len(tensors) > 1 else []
        for other in others:
            with pytest.raises(MixerError, match=name):
                operator.forward(*tensors[:i], other, *tensors[i + 1 :], *options, True)
    found = operator.forward(*tensors, *options, True)
    y, *saved = (found,) if isinstance(found, torch.Tensor) else found
    given = [torch.ones_like(y), *tensors, *([y, *saved] if operator.keeps_result else saved)]
    for i in (0, *range(1 + len(tensors), len(given))):
        with pytest.raises(MixerError, match=f"{name}_backward"):
            operator.backward(*given[:i], None, *given[i + 1 :], *options)


@pytest.mark.parametrize("name", KEPT)
def test_meta_tensors_are_checked_as_others(name):
    operator = OPERATORS[name]
    tensors, options = call_of(name)
    found = operator.forward(*(a.to("meta") for a in tensors), *options, False)
    y = found if isinstance(found, torch.Tensor) else found[0]
    assert y.is_meta
    assert y.shape == operator.eager(*tensors, *options).shape
    refused = 0
    for given in wrong_ones(tensors):
        try:
            operator.forward(*given, *options, False)
        except MixerError:
            refused += 1
            with pytest.raises(MixerError, match=name):
                operator.forward(*(a.to("meta") for a in given), *options, False)
    assert refused >= 3


def test_a_band_of_no_keys_is_refused():
    """Its kernel wrote before its buffers."""
    q, k, v = (torch.randn(2, 6, 8) for _ in range(3))
    for causal in (False, True):
        with pytest.raises(MixerError, match="aft_band"):
            torch.ops.tokenmix.aft_band(q, k, v, torch.randn(1, 1, 6, 0), None, causal, True)
