"""Memory that C and Triton read and write: torch's defaults, traces, lazy tensors, sizes that do not fit, positions."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

import tokenmix

from . import attempt


def _said(call: Callable[[], str]) -> str:
    try:
        return call()
    except (ValueError, RuntimeError, torch.jit.Error) as error:
        return f"refused: {str(error).strip().splitlines()[-1][:160]}"


@attempt("m1", "AFT-full of 600 tokens while torch's default dtype is bfloat16")
def default_dtype() -> str:
    """C writes float32 into buffers whose dtype nobody stated."""
    torch.set_default_dtype(torch.bfloat16)
    mixer, x = tokenmix.build_mixer("aft_full", 64, max_len=600, causal=True), torch.randn(4, 600, 64)
    with torch.no_grad():
        for _ in range(30):
            y = mixer(x)
        with tokenmix.functional.use_backend("eager"):
            want = mixer(x)
    return f"off by {float((y.float() - want.float()).abs().max()):.0e}"


@attempt("m2", "A stream on the CPU while torch's default device is another")
def default_device() -> str:
    """Buffers on meta have no address."""
    mixer, x = tokenmix.build_mixer("aft_forget", 16, causal=True).eval(), torch.randn(2, 3, 16)
    with torch.no_grad():
        state = mixer.init_state(2)
        want = mixer.extend(x, state)[0]
        torch.set_default_device("meta")
        got = mixer.extend(x, state)[0]
    return f"{got.device}, equal: {torch.equal(got, want)}"


def _traced(name: str, traced: int, called: int, **options: object) -> str:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    mixer, x = tokenmix.build_mixer(name, 8, **options).eval(), torch.randn(2, called, 8)
    with torch.no_grad():
        program = torch.jit.trace(mixer, torch.randn(2, traced, 8), check_trace=False)
        y, want = program(x), mixer(x)
    if y.shape != want.shape:
        return f"{y.shape[1]} rows from {called} tokens"
    return f"off by {float((y - want).abs().max()):.0e}"


@attempt("m3", "A trace of AFT-simple at 100,000 tokens, called with 2")
def trace_simple() -> str:
    """The length was baked into the call of C."""
    return _said(lambda: _traced("aft_simple", 100_000, 2))


@attempt("m4", "A trace of image_local at 10 tokens, called with 11")
def trace_image_local() -> str:
    """Blocks are cut by the length."""
    return _said(lambda: _traced("image_local", 10, 11, causal=True, heads=2, block=3, memory=2))


@attempt("m4", "A trace of causal AFT-conv at 10 tokens, called with 70")
def trace_conv() -> str:
    """Loops over blocks are unrolled."""
    return _said(lambda: _traced("aft_conv", 10, 70, causal=True, heads=2, kernel_size=3))


@attempt("m4", "A trace of a random Synthesizer, called at another length")
def trace_synthesizer() -> str:
    """Sizes are tensors while a trace records."""
    return _said(lambda: _traced("synthesizer_random", 10, 7, heads=2, max_len=20))


@attempt("m5", "An operator with more queries than q has rows")
def queries() -> str:
    """C would read past q."""
    q = torch.randn(2, 6, 8)
    return _said(lambda: f"{tuple(torch.ops.tokenmix.aft_simple(q, q, q, None, 60, False, False)[0].shape)}")


@attempt("m5", "A backward operator with what no forward kept")
def kept() -> str:
    """C would read past the kept numbers."""
    q = torch.randn(2, 600, 8)
    call = torch.ops.tokenmix.hydra_backward
    return _said(lambda: f"{tuple(call(q, q, q, q, None, q.new_empty(0), True, True, True, 1e-6, False)[0].shape)}")


@attempt("m8", "A state whose negation torch postpones")
def negated() -> str:
    """C read the numbers before they were negated."""
    torch.manual_seed(0)
    mixer, x = tokenmix.build_mixer("aft_simple", 16, causal=True).eval(), torch.randn(1, 4, 16)
    with torch.no_grad():
        state = mixer.extend(x[:, :3], mixer.init_state(1))[1]
        lazy = type(state)(*(torch._neg_view(-a) if a.is_floating_point() else a for a in state))
        off = mixer.extend(x[:, 3:], lazy)[0] - mixer.extend(x[:, 3:], state)[0]
    return f"off by {float(off.abs().max()):.0e}"


@attempt("m9", "xPOS at position 2^62")
def far() -> str:
    """float64 holds integers up to 2^53."""
    mixer = tokenmix.build_mixer("attention", 16, heads=2, causal=True, positions={"name": "xpos"})
    at = torch.tensor([[2**62, 2**62 + 1]])
    return _said(lambda: f"finite: {bool(mixer(torch.randn(1, 2, 16), positions=at).isfinite().all())}")
