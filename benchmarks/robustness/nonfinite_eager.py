"""NaN and infinity in the eager forms: what reaches whom."""

from __future__ import annotations

import torch

import tokenmix

from . import attempt

MIXERS = {
    "attention": {"heads": 2},
    "aft_full": {"max_len": 12},
    "aft_simple": {},
    "linear": {"heads": 2},
    "performer": {"heads": 2},
    "external": {"slots": 4},
    "gmlp": {"max_len": 12},
    "synthesizer_random": {"max_len": 12, "heads": 2},
    "local": {"window": 3, "heads": 2},
    "transformer_xl": {"heads": 2},
    "reformer": {"heads": 2, "buckets": 4, "chunk": 2},
    "routing": {"heads": 2, "clusters": 2, "window": 3},
    "sinkhorn": {"heads": 2, "block": 3},
}


def _outputs(name: str, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of one row of 12 tokens, token 7 NaN and not."""
    torch.manual_seed(0)
    mixer, x = tokenmix.build_mixer(name, 8, causal=causal, **MIXERS[name]).eval(), torch.randn(1, 12, 8)
    bad = x.clone()
    bad[0, 7] = float("nan")
    with torch.no_grad(), tokenmix.use_backend("eager"):
        return mixer(bad)[0], mixer(x)[0]


def _count_names(names: list[str]) -> str:
    return f"{len(names)} of {len(MIXERS)} mixers" + (f": {', '.join(names)}" if names else "")


@attempt("2", "A NaN token of the future reaches outputs before it (eager)")
def future() -> str:
    """The causal forms multiplied it by zero, which is NaN."""
    pairs = {name: _outputs(name, True) for name in MIXERS}
    changed = [name for name, (got, want) in pairs.items() if not torch.allclose(got[:7], want[:7], atol=1e-5)]
    return _count_names(changed)


@attempt("2", "A NaN token that all may attend leaves rows with plausible numbers (eager)")
def swallowed() -> str:
    """Buckets and sorts lost it."""
    names = [name for name in MIXERS if name not in ("local",)]  # in whose window only some rows see it
    return _count_names([name for name in names if bool(_outputs(name, False)[0].isfinite().all(-1).any())])


@attempt("2", "A loss over the past has NaN gradients from a NaN value of the future (eager attention)")
def gradients() -> str:
    """Zero times NaN once more, on the way back."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 12, 8).unbind(0)
    k, v = k.clone(), v.clone()
    k[0, 7], v[0, 7] = float("nan"), float("nan")
    leaves = [a.requires_grad_() for a in (q, k, v)]
    y = tokenmix.functional.attention(*leaves, heads=2, causal=True, backend="eager")
    found = torch.autograd.grad(y[:, :7].square().sum(), leaves)
    return f"{sum(int((~g.isfinite()).sum()) for g in found)} of {sum(g.numel() for g in found)} numbers are not finite"
