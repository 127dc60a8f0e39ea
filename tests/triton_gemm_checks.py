"""Check AFT-full, AFT-local and AFT-conv in Triton, in the interpreter.

test_triton_gemm.py runs the checks in processes of their own. ``TRITON_INTERPRET=1 python triton_gemm_checks.py
NAME...``
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from tokenmix import reference
from tokenmix.kernels.triton import aft_band as band
from tokenmix.kernels.triton import aft_full as full
from tokenmix.kernels.triton import launch
from tokenmix.testing.inputs import adversarial_keys
from tokenmix.testing.tolerances import ADVERSARIAL
from tokenmix.testing.tolerances import BY_DTYPE as TOLERANCES

SMALL = full.Sizes(rows=32, features=32, step=32, keys=32, held=32 * 64)
BLOCK = (16, 32)
launch.SUMMED = 16


def drawn(*shape: int, seed: int, dtype=torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def taken(w: Tensor, T: int, causal: bool) -> Tensor:
    """The band (B, h, T or 1, L) as log-weights (B, h, T, T)."""
    L = w.shape[-1]
    t = torch.arange(T)
    j = t - t[:, None] + (L - 1 if causal else L // 2)
    dense = w.expand(-1, -1, T, L).gather(-1, j.clamp(0, L - 1).expand(*w.shape[:2], T, T))
    return torch.where((j >= 0) & (j < L), dense, 0.0)


def wanted(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The reference, head by head: w (B, h, T, S)."""
    (B, T), S = (v.shape[0], w.shape[2]), v.shape[1]
    seen = torch.ones(B, T, S, dtype=torch.bool) if mask is None else mask[:, None].expand(B, T, S)
    seen = seen.tril() if causal else seen
    h, c = w.shape[1], v.shape[2] // w.shape[1]
    parts = []
    for i, (own, value) in enumerate(zip(k.chunk(h, -1), v.chunk(h, -1), strict=True)):
        gate = torch.zeros(B, T, c, dtype=v.dtype) if q is None else q[..., i * c : i * c + c]
        parts.append(
            reference.aft_full(
                gate, own.expand_as(value), value, w[:, i], mask=seen, gate=None if q is None else "sigmoid"
            )
        )
    return torch.cat(parts, -1)


def compare(
    module: Any,
    args: tuple[Tensor | None, ...],
    mask: Tensor | None,
    causal: bool,
    dense: Any,
    tol: float,
    said: str,
    **sizes: Any,
) -> None:
    """Compare outputs and gradients of a kernel module with the reference, on the same numbers.

    The gradients are measured against the largest of them times its argument.
    """
    y, *saved = module.forward(*args, mask, causal=causal, save=True, **sizes)
    assert torch.equal(y, module.forward(*args, mask, causal=causal, save=False, **sizes)[0]), said
    g = drawn(*y.shape, seed=9, dtype=y.dtype)
    kept = (y, *saved) if module is band else saved
    found = module.backward(g, *args, mask, *kept, causal=causal, **sizes)
    leaves = [None if a is None else a.double().nan_to_num().requires_grad_() for a in args]
    ref = dense(*leaves)
    present = [a for a in leaves if a is not None]
    right = torch.autograd.grad(ref, present, g.double())
    grads = [d for d, a in zip(found, leaves, strict=True) if a is not None]
    at = (
        2 if args[0] is not None else 1
    )  # where the values are: their gradient does not cancel, and what does is rounded against it
    size = float(right[at].abs().max() * present[at].detach().abs().max())
    floors = [0.0, *(0.0 if i == at else size for i in range(len(present)))]
    for i, (a, b, floor) in enumerate(zip((y, *grads), (ref.detach(), *right), floors, strict=True)):
        error = float((a - b).abs().max()) / max(float(b.abs().max()), floor, 1e-30)
        assert error < tol, f"{said}: {f'gradient {i - 1}' if i else 'output'} off by {error:.1e}"  # NaN fails too
    if mask is not None:
        assert all(d[~mask].eq(0).all() for d in found[1:3]), said


def whole(
    said: str,
    T: int,
    S: int,
    D: int,
    *,
    causal: bool,
    dtype=torch.float32,
    keys=None,
    span=1.0,
    r=0,
    Bw=1,
    mask=None,
    gate=True,
    tol=None,
    B=1,
) -> None:
    """One call of AFT-full."""
    B = 2 if mask is not None or Bw > 1 else B
    q, v = drawn(B, T, D, seed=1, dtype=dtype), drawn(B, S, D, seed=3, dtype=dtype)
    k = drawn(B, S, D, seed=2, dtype=dtype) if keys is None else keys.to(dtype)
    w, w2 = ((torch.rand(Bw, n, r or S, generator=torch.Generator().manual_seed(n + 4)) * 2 - 1) for n in (T, S))
    w, w2 = (
        ((w * (span / r) ** 0.5).to(dtype), (w2 * (span / r) ** 0.5).to(dtype)) if r else ((w * span).to(dtype), None)
    )
    if mask is not None:
        k, v = (torch.where(mask[..., None], a, torch.nan) for a in (k, v))

    def dense(q, k, v, w, w2):
        return wanted(q, k, v, (w if w2 is None else w @ w2.mT)[:, None], mask, causal)

    compare(full, (q if gate else None, k, v, w, w2), mask, causal, dense, tol or TOLERANCES[dtype], said, sizes=SMALL)


def near(
    said: str,
    T: int,
    D: int,
    L: int,
    *,
    causal: bool,
    h=0,
    dtype=torch.float32,
    keys=None,
    span=1.0,
    Bw=1,
    mask=None,
    gate=True,
    tol=None,
    B=1,
) -> None:
    """One call of AFT-local (h = 0) or AFT-conv."""
    B = 2 if mask is not None or Bw > 1 else B
    q, v = drawn(B, T, D, seed=1, dtype=dtype), drawn(B, T, D, seed=3, dtype=dtype)
    k = drawn(B, T, h or D, seed=2, dtype=dtype) if keys is None else keys.to(dtype)
    w = (torch.rand(Bw, h or 1, 1 if h else T, L, generator=torch.Generator().manual_seed(4)) * 2 - 1) * span
    if mask is not None:
        k, v = (torch.where(mask[..., None], a, torch.nan) for a in (k, v))

    def dense(q, k, v, w):
        return wanted(q, k, v, taken(w, T, causal), mask, causal)

    compare(band, (q if gate else None, k, v, w), mask, causal, dense, tol or TOLERANCES[dtype], said, block=BLOCK)


def holes(T: int) -> Tensor:
    """A left-padded row with holes, and a row of nothing."""
    mask = torch.rand(2, T, generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, : T // 2], mask[1] = False, False
    return mask


def full_shapes() -> None:
    whole("one token", 1, 1, 1, causal=True)
    whole("two blocks of rows", 40, 40, 3, causal=True, B=2)
    whole("cross", 5, 40, 33, causal=False, gate=False)
    whole("factors", 35, 35, 2, causal=True, r=3)
    whole("bfloat16", 36, 36, 5, causal=True, dtype=torch.bfloat16)
    whole("float16", 9, 36, 5, causal=False, dtype=torch.float16, Bw=2)


def full_masks() -> None:
    for causal in (True, False):
        whole(f"mask, causal {causal}", 40, 40, 3, causal=causal, mask=holes(40))


def full_adversarial() -> None:
    for name, keys in adversarial_keys((1, 36, 2), size=100.0).items():
        if name in ("uniform", "late spike", "ramp up", "alternating"):
            whole(name, 36, 36, 2, causal=True, keys=keys, span=60.0, tol=ADVERSARIAL)
    whole(
        "all keys",
        33,
        33,
        2,
        causal=False,
        keys=adversarial_keys((1, 33, 2), size=100.0)["uniform"],
        span=60.0,
        tol=ADVERSARIAL,
    )


def band_shapes() -> None:
    near("one token", 1, 1, 3, causal=True)
    near("local", 40, 3, 5, causal=True, B=2)
    near("local, all", 40, 3, 21, causal=False, gate=False)
    near("conv", 40, 4, 5, causal=True, h=2, B=2)
    near("conv, all", 19, 4, 5, causal=False, h=2, Bw=2)
    near("bfloat16", 36, 5, 3, causal=True, dtype=torch.bfloat16)
    near("float16", 36, 5, 3, causal=False, dtype=torch.float16)


def band_masks() -> None:
    for causal in (True, False):
        near(f"mask, causal {causal}", 40, 3, 5, causal=causal, mask=holes(40))


def band_adversarial() -> None:
    for name, keys in adversarial_keys((1, 50, 2), size=100.0).items():
        if name in ("uniform", "late spike", "ramp down"):
            near(name, 50, 2, 5, causal=True, keys=keys, span=60.0, tol=ADVERSARIAL)
    near(
        "all keys",
        50,
        2,
        5,
        causal=False,
        keys=adversarial_keys((1, 50, 2), size=100.0)["ramp up"],
        span=60.0,
        tol=ADVERSARIAL,
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, where an exponential overflows that is then not used
    for check in sys.argv[1:]:
        globals()[check]()
