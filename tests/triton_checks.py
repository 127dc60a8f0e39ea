"""Check the Triton kernels in the interpreter: ``TRITON_INTERPRET=1 python triton_checks.py NAME``.

test_triton.py runs the checks in a process of their own.
"""

from __future__ import annotations

import itertools
import sys

import torch

from kernel_checks import adversarial, both, worst
from tokenmix import functional
from tokenmix.functional.hydra import hydra
from tokenmix.kernels.triton import aft_forget as forget
from tokenmix.kernels.triton import aft_simple as scan
from tokenmix.kernels.triton import hydra as hydra_kernels
from tokenmix.kernels.triton import linear

TOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def qkv(B: int, T: int, S: int, D: int, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(B, n, D, generator=draw).to(dtype) for n in (T, S, S))


def holes(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A mask with a left-padded row, holes and a row of nothing; k and v with NaN under it."""
    mask = torch.rand(k.shape[:2], generator=torch.Generator().manual_seed(1)) > 0.4
    mask[0, : k.shape[1] // 2], mask[-1] = False, False
    return mask, *(torch.where(mask[..., None], a, torch.nan) for a in (k, v))


def scan_adversarial() -> None:
    for causal in (True, False):
        adversarial("aft_simple", {"causal": causal}, dim=3, length=70, backend="triton")


def scan_shapes() -> None:
    shapes = ((1, 1, 1, torch.float32, "sigmoid"), (2, 9, 66, torch.bfloat16, None), (1, 66, 3, torch.float16, "tanh"))
    for causal, (B, T, D, dtype, gate) in itertools.product((True, False), shapes):
        error = worst(
            both(functional.aft_simple, qkv(B, T, T, D, dtype), {"causal": causal, "gate": gate}, backend="triton")
        )
        assert error < TOL[dtype], (causal, B, T, D, dtype, error)
    assert worst(both(functional.aft_simple, qkv(2, 5, 70, 20), {}, backend="triton")) < 1e-5, "queries over other keys"
    q, k, v = torch.randn(2, 9, 3 * 40, generator=torch.Generator().manual_seed(0)).transpose(0, 1).chunk(3, -1)
    assert worst(both(functional.aft_simple, (q, k, v), {"causal": True}, backend="triton")) < 1e-5, "strides"


def scan_masks() -> None:
    for causal in (True, False):
        q, k, v = qkv(3, 66, 66, 3)
        mask, k, v = holes(k, v)
        leaves = [a.double().requires_grad_() for a in (q, *(x.nan_to_num() for x in (k, v)))]
        ref, g = (
            functional.aft_simple(*leaves, causal=causal, key_mask=mask, backend="eager"),
            torch.randn(q.shape, generator=torch.Generator().manual_seed(2)),
        )
        y, saved = scan.forward(q, k, v, mask, T=66, causal=causal, save=True)
        found = [y, *scan.backward(g, q, k, v, mask, saved, T=66, causal=causal)]
        assert worst(list(zip(found, [ref, *torch.autograd.grad(ref, leaves, g.double())], strict=True))) < 1e-5, causal
        assert y[2].eq(0).all()
        assert all(a[~mask].eq(0).all() for a in found[2:])


def scan_nonfinite() -> None:
    """A key or value that is not finite makes what may attend it so, and nothing else."""
    nan, inf = float("nan"), float("inf")
    for causal, which, at, value in (
        (True, 1, 0, nan),
        (True, 1, 35, inf),
        (True, 2, 35, nan),
        (False, 1, 35, nan),
        (False, 1, 35, inf),
    ):
        args = [a.requires_grad_() for a in qkv(2, 66, 66, 2)]
        want = functional.aft_simple(*args, causal=causal, backend="eager")
        with torch.no_grad():
            args[which][0, at, 1] = value
        y = functional.aft_simple(*args, causal=causal, backend="triton")
        rows = torch.zeros(y.shape, dtype=torch.bool)
        rows[0, at if causal else 0 :, 1] = True
        assert not y[rows].isfinite().any(), (causal, which, at, value)
        assert torch.allclose(y[~rows], want[~rows], atol=1e-5), (causal, which, at, value)
        dk, dv = torch.autograd.grad(y.sum(), args[1:])
        assert not (dk + dv)[0, :, 1].isfinite().all(), (causal, which, at, value)
        assert (dk + dv)[1].isfinite().all(), (causal, which, at, value)
    k = torch.randn(1, 66, 3)
    k[0, 0, 1] = float("-inf")
    assert functional.aft_simple(k, k, torch.randn(1, 66, 3), causal=True, backend="triton").isfinite().all(), (
        "a key of -inf weighs nothing"
    )


def others_nonfinite() -> None:
    """Check the same of the other kernels: rows that may attend a bad token are not finite.

    All others and the gradients of a loss over them are what they were.
    """
    w, kernel = (torch.randn(*shape, generator=torch.Generator().manual_seed(3)) for shape in ((20, 20), (1, 3)))
    forms = {
        "aft_full": lambda *a, **o: functional.aft_full(*a, w, **o),
        "aft_local": lambda *a, **o: functional.aft_local(*a, w, window=3, **o),
        "aft_conv": lambda q, k, v, **o: functional.aft_conv(q, k[..., :1], v, kernel, **o),
        "hydra": functional.hydra,
        "linear": lambda *a, **o: functional.linear_attention(*a, heads=2, **o),
    }
    bad = (
        (True, 1, 0, float("nan")),
        (True, 2, 11, float("inf")),
        (False, 1, 11, float("nan")),
        (True, 0, 5, float("nan")),
    )
    for (name, form), (causal, which, at, value) in itertools.product(forms.items(), bad):
        args = [a.requires_grad_() for a in qkv(2, 20, 20, 4)]
        want = form(*args, causal=causal, backend="eager")
        with torch.no_grad():
            args[which][0, at, 0] = value
        y = form(*args, causal=causal, backend="triton")
        rows = torch.zeros(y.shape[:2], dtype=torch.bool)
        rows[0, slice(at, at + 1) if which == 0 else slice(at if causal else 0, None)] = True
        assert not y[rows].isfinite().all(-1).any(), (name, causal, which, at, value)
        assert torch.allclose(y[~rows], want[~rows], atol=1e-4), (name, causal, which, at, value)
        found = torch.autograd.grad(y[~rows].sum(), args)
        assert all(a[1].isfinite().all() for a in found), (name, causal, which, at, value)
        assert all(a[0, :at].isfinite().all() for a in found), (name, causal, which, at, value)


def scan_packed() -> None:
    for lengths, size in (((64, 0, 3, 1), 1.0), ((2, 70, 1, 0), 40.0)):
        q, k, v = (a[0] for a in qkv(1, sum(lengths), sum(lengths), 3))
        k, g = k * size, torch.randn(q.shape, generator=torch.Generator().manual_seed(2))
        borders = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        y, saved = scan.forward_packed(q, k, v, borders, save=True)
        got, want = [y, *scan.backward_packed(g, q, k, v, borders, saved)], []
        for a, b in ((a, b) for a, b in itertools.pairwise(borders.tolist()) if a < b):
            leaves = [x[None, a:b].double().requires_grad_() for x in (q, k, v)]
            ref = functional.aft_simple(*leaves, causal=True, backend="eager")
            want.append([ref[0], *(x[0] for x in torch.autograd.grad(ref, leaves, g[None, a:b].double()))])
        assert worst([(x, torch.cat(parts)) for x, parts in zip(got, zip(*want, strict=True), strict=True)]) < 1e-5, (
            lengths
        )


def scan_does_not_drift() -> None:
    v = torch.full((1, 700, 1), 0.1)
    y = functional.aft_simple(v, torch.zeros_like(v), v, causal=True, gate=None, backend="triton")
    assert float((y - 0.1).abs().max()) < 1e-7


def scan_operator() -> None:
    args = [a.requires_grad_() for a in qkv(1, 5, 5, 3)]
    run = torch.compile(
        lambda *a: functional.aft_simple(*a, causal=True, backend="triton"), fullgraph=True, backend="aot_eager"
    )
    got, want = (
        torch.autograd.grad(f(*args).square().sum(), args)
        for f in (run, lambda *a: functional.aft_simple(*a, causal=True, backend="eager"))
    )
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))


def forget_all() -> None:
    """Check AFT-forget at several sizes, gates, norms and masks, with decays of all sizes and -inf."""
    shapes = (
        (1, 1, 1, torch.float32, "sigmoid", None),
        (2, 9, 66, torch.bfloat16, None, None),
        (1, 66, 4, torch.float16, "tanh", 2),
        (1, 140, 3, torch.float32, "sigmoid", None),
    )
    for B, T, D, dtype, gate, heads in shapes:
        q, k, v = qkv(B, T, T, D, dtype)
        g = -torch.rand(B, T, D, generator=torch.Generator().manual_seed(5)).to(dtype).pow(8) * 40
        options = {"causal": True, "gate": gate, "heads": heads}
        error = worst(both(functional.aft_forget, (q, k, v, g), options, backend="triton"))
        assert error < TOL[dtype], (B, T, D, dtype, gate, heads, error)
    q, k, v, g = torch.randn(2, 9, 4 * 40, generator=torch.Generator().manual_seed(0)).transpose(0, 1).chunk(4, -1)
    assert worst(both(functional.aft_forget, (q, k, v, -g.exp()), {"causal": True}, backend="triton")) < 1e-5, "strides"
    for size in (100.0, 1e4):  # keys that rise and fall, decays that forget
        q, k, v = qkv(1, 80, 80, 4)
        k, g = k * size, -torch.rand(1, 80, 4, generator=torch.Generator().manual_seed(6)) * size
        y, want = (
            functional.aft_forget(*(a.to(kind) for a in (q, k, v, g)), causal=True, backend=backend)
            for kind, backend in ((torch.float32, "triton"), (torch.float64, "eager"))
        )
        assert float((y - want).abs().max()) < 1e-5 * max(1.0, size / 100), size
    g[:, 70] = -torch.inf
    y = functional.aft_forget(q, k, v, g, causal=True, backend="triton")
    alone = functional.aft_forget(*(a[:, 70:] for a in (q, k, v, g)), causal=True, backend="eager")
    assert torch.allclose(y[:, 70:], alone, atol=1e-4), "a decay of -inf forgets all before"


def forget_masks() -> None:
    q, k, v = qkv(3, 70, 70, 3)
    g = -torch.rand(3, 70, 3, generator=torch.Generator().manual_seed(5))
    mask, k, v = holes(k, v)
    leaves = [a.double().requires_grad_() for a in (q, *(x.nan_to_num() for x in (k, v)), g)]
    ref = functional.aft_forget(*leaves, causal=True, key_mask=mask, backend="eager")
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(2))
    g = torch.where(mask[..., None], g, torch.nan)
    y, saved = forget.forward(q, k, v, g, mask, heads=0, eps=1e-6, save=True)
    found = [y, *forget.backward(weight, q, k, v, g, mask, saved, heads=0, eps=1e-6)]
    assert worst(list(zip(found, [ref, *torch.autograd.grad(ref, leaves, weight.double())], strict=True))) < 1e-5
    assert y[2].eq(0).all()
    assert all(a[~mask].eq(0).all() for a in found[2:])


def forget_nonfinite() -> None:
    """A bad token makes what may attend it not finite, and no gradient of a loss over other tokens."""
    for which, at, value in ((1, 0, torch.nan), (2, 66, torch.inf), (3, 66, torch.nan), (0, 66, torch.nan)):
        args = [*qkv(2, 70, 70, 2), -torch.rand(2, 70, 2, generator=torch.Generator().manual_seed(5)) / 99]
        want = functional.aft_forget(*args, causal=True, backend="eager")
        args[which][0, at, 1] = value
        args = [a.requires_grad_() for a in args]
        y = functional.aft_forget(*args, causal=True, backend="triton")
        rows = torch.zeros(y.shape, dtype=torch.bool)
        rows[0, slice(at, at + 1) if which == 0 else slice(at, None), 1] = True
        assert not y[rows].isfinite().any(), (which, at, value)
        assert torch.allclose(y[~rows], want[~rows], atol=1e-5), (which, at, value)
        found = torch.autograd.grad(y[~rows].sum(), args)
        assert all(a[1].isfinite().all() and a[0, :at].isfinite().all() for a in found), (which, at, value)


def forget_operator() -> None:
    args = [a.requires_grad_() for a in (*qkv(1, 70, 70, 3), -torch.rand(1, 70, 3))]
    run = torch.compile(
        lambda *a: functional.aft_forget(*a, causal=True, backend="triton"), fullgraph=True, backend="aot_eager"
    )
    got, want = (
        torch.autograd.grad(f(*args).square().sum(), args)
        for f in (run, lambda *a: functional.aft_forget(*a, causal=True, backend="eager"))
    )
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))


def hydra_all() -> None:
    cases = (
        (1, 1, 3, "identity", False, 1.0),
        (2, 66, 3, "cosine", False, 1.0),
        (2, 9, 67, "cosine", True, 1e25),
        (3, 9, 2, "identity", True, 1.0),
    )
    for causal, (B, T, D, feature, mean, size) in itertools.product((True, False), cases):
        q, k, v = qkv(B, T, T, D)
        mask, k, v = holes(k * size, v) if B > 1 else (None, k, v)
        g, cosine = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)), feature == "cosine"
        options = {"causal": causal, "of_q": cosine, "of_k": cosine, "eps": 1e-6, "mean": mean}
        leaves = [a.double().requires_grad_() for a in (q, *(x.nan_to_num() for x in (k, v)))]
        ref = hydra(*leaves, feature=feature, normalise=mean, causal=causal, key_mask=mask, eps=1e-6, backend="eager")
        y, saved = hydra_kernels.forward(q, k, v, mask, **options, save=True)
        got = [y, *hydra_kernels.backward(g, q, k, v, mask, saved, **options)]
        error = worst(list(zip(got, [ref, *torch.autograd.grad(ref, leaves, g.double())], strict=True)))
        assert error < 1e-5, (causal, B, T, D, feature, mean, error)
        if T == 66:
            half = hydra_kernels.forward(*(a.bfloat16() for a in (q, k, v)), mask, **options, save=False)[0]
            assert worst([(half, ref)]) < 2e-2


def linear_adversarial() -> None:
    for causal, feature in itertools.product((True, False), ("elu", "exp")):
        adversarial("linear", {"heads": 2, "causal": causal, "feature": feature}, dim=6, length=70, backend="triton")


def linear_shapes() -> None:
    shapes = (
        (1, 2, 3, 1, torch.float32),
        (1, 66, 70, 2, torch.float32),
        (1, 9, 66, 1, torch.bfloat16),
        (1, 70, 6, 2, torch.float16),
    )
    runs = itertools.product((True, False), (("elu", shapes[::2]), ("exp", shapes[1::2])))  # the masks have the others
    for causal, feature, (B, T, D, heads, dtype) in ((c, f, one) for c, (f, some) in runs for one in some):
        error = worst(
            both(
                functional.linear_attention,
                qkv(B, T, T, D, dtype),
                {"heads": heads, "causal": causal, "feature": feature},
                backend="triton",
            )
        )
        assert error < TOL[dtype], (causal, feature, B, T, D, dtype, error)
    for S in (3, 530):  # of one segment and of two
        assert worst(both(functional.linear_attention, qkv(1, 70, S, 20), {"heads": 2}, backend="triton")) < 1e-5, (
            "queries over other keys"
        )
    one = [a.requires_grad_() for a in qkv(1, 1, 1, 4)]
    y = functional.linear_attention(*one, heads=2, causal=True, backend="triton")
    assert torch.allclose(y, one[2]), "one token"
    assert float(torch.autograd.grad(y.sum(), one)[1].abs().max()) < 1e-6, "one key has all the weight"
    q, k, v = torch.randn(2, 9, 3 * 40, generator=torch.Generator().manual_seed(0)).transpose(0, 1).chunk(3, -1)
    assert worst(both(functional.linear_attention, (q, k, v), {"heads": 2, "causal": True}, backend="triton")) < 1e-5, (
        "strides"
    )
    q, k, v = torch.randn(2, 3 * 40, 9, generator=torch.Generator().manual_seed(0)).transpose(1, 2).chunk(3, -1)
    assert worst(both(functional.linear_attention, (q, k, v), {"heads": 2, "causal": True}, backend="triton")) < 1e-5, (
        "features apart"
    )


def linear_jumps() -> None:
    """Check keys that rise by hundreds within a chunk.

    Only chunks with such a rise go pair by pair, and what is before and after them stays exact.
    """
    at = torch.arange(200)[:, None]
    q, k, v = qkv(1, 200, 200, 8)
    k = k + torch.where(at < 90, -120.0, 0.0) + torch.where(at >= 170, 80.0, 0.0)
    for feature in ("exp", "elu"):
        assert (
            worst(
                both(
                    functional.linear_attention,
                    (q, k, v),
                    {"heads": 2, "causal": True, "feature": feature},
                    backend="triton",
                )
            )
            < 1e-5
        ), feature
    saved = linear.forward(q, k, v, None, heads=2, elu=False, causal=True, save=True)[1]
    assert saved.flatten()[-8:].view(2, 4).tolist() == [[0.0, 1.0, 1.0, 0.0]] * 2
    padded = torch.arange(200).expand(1, -1) >= 70  # the queries that see nothing make no chunk slow
    assert (
        not linear.forward(*qkv(1, 200, 200, 8), padded, heads=2, elu=True, causal=True, save=True)[1]
        .flatten()[-8:]
        .any()
    )


def linear_masks() -> None:
    for causal, feature in itertools.product((True, False), ("elu", "exp")):
        q, k, v = qkv(3, 70, 70, 6)
        mask, k, v = holes(k, v)
        options = {"heads": 2, "causal": causal, "elu": feature == "elu"}
        leaves = [a.double().requires_grad_() for a in (q, *(x.nan_to_num() for x in (k, v)))]
        ref = functional.linear_attention(
            *leaves, heads=2, causal=causal, feature=feature, key_mask=mask, backend="eager"
        )
        g = torch.randn(q.shape, generator=torch.Generator().manual_seed(2))
        y, saved = linear.forward(q, k, v, mask, **options, save=True)
        found = [y, *linear.backward(g, q, k, v, mask, y, saved, **options)]
        assert worst(list(zip(found, [ref, *torch.autograd.grad(ref, leaves, g.double())], strict=True))) < 1e-5, (
            causal,
            feature,
        )
        assert y[2].eq(0).all()
        assert all(a[~mask].eq(0).all() for a in found[2:])


def linear_large() -> None:
    for causal, feature in itertools.product((True, False), ("elu", "exp")):
        args = [(a * s).requires_grad_() for a, s in zip(qkv(1, 70, 70, 3), (1.0, 1e6, 1.0), strict=True)]
        y = functional.linear_attention(*args, heads=1, causal=causal, feature=feature, backend="triton")
        assert all(bool(a.isfinite().all()) for a in (y, *torch.autograd.grad(y.sum(), args))), (causal, feature)


def linear_does_not_drift() -> None:
    x = torch.full((1, 5000, 1), 0.1)
    for causal in (True, False):
        y = functional.linear_attention(x, x, x, heads=1, causal=causal, backend="triton")
        assert float((y / 0.1 - 1).abs().max()) < 3e-6


def linear_operator() -> None:
    args = [a.requires_grad_() for a in qkv(1, 5, 5, 4)]
    run = torch.compile(
        lambda *a: functional.linear_attention(*a, heads=2, causal=True, backend="triton"),
        fullgraph=True,
        backend="aot_eager",
    )
    got, want = (
        torch.autograd.grad(f(*args).square().sum(), args)
        for f in (run, lambda *a: functional.linear_attention(*a, heads=2, causal=True, backend="eager"))
    )
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, want, strict=True))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        globals()[name]()
