"""Random shapes, masks, weights and keys through every AFT function, against the float64 reference."""

from __future__ import annotations

import random

import pytest
import torch

from tokenmix import functional
from tokenmix import reference as R

KEYS = {
    "normal": lambda B, T, D: torch.randn(B, T, D),
    "wide": lambda B, T, D: torch.rand(B, T, D) * 200 - 100,
    "spike": lambda B, T, D: torch.randn(B, T, D) + 1e4 * (torch.arange(T) > T // 2)[None, :, None],
    "ramp": lambda B, T, D: torch.linspace(-1e4, 1e4, T)[None, :, None].expand(B, T, D).contiguous(),
    "fall": lambda B, T, D: torch.linspace(100, -100, T)[None, :, None] + torch.randn(B, T, D),
    "huge": lambda B, T, D: torch.rand(B, T, D) * 2e30 - 1e30,
}
TOLERANCE = 1e-6  # of the gated output against its largest element; inputs are float32, sums float64


def draw(rng: random.Random, kind: str) -> dict:
    """One call: shapes, keys, masks."""
    B, T, heads, per_head = (
        rng.randint(1, 3),
        rng.choice([1, 2, 7, 8, 9, 16, 17, 31, 40, 65, 70]),
        rng.choice([1, 2]),
        rng.choice([1, 3]),
    )
    D = heads * per_head
    torch.manual_seed(rng.randint(0, 1 << 30))
    q, v, k = torch.randn(B, T, D), torch.randn(B, T, D), KEYS[kind](B, T, D)
    causal = rng.random() < 0.5
    mask = torch.ones(B, T, T, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    options: dict = {"causal": causal, "gate": rng.choice(["sigmoid", "tanh", None])}
    if rng.random() < 0.5:
        options["key_mask"] = torch.rand(B, T) < rng.choice([0.2, 0.8])
        mask = mask & options["key_mask"][:, None]
    return {
        "q": q,
        "k": k,
        "v": v,
        "w": torch.rand(T, T) * 120 - 60,
        "mask": mask,
        "options": options,
        "heads": heads,
        "rng": rng,
    }


def close(y: torch.Tensor, exact: torch.Tensor) -> None:
    assert y.isfinite().all()
    assert float((y.double() - exact).abs().max()) <= TOLERANCE * max(1.0, float(exact.abs().max()))


def exact(name: str, call: dict, *extra: torch.Tensor, k: torch.Tensor | None = None, **structure) -> torch.Tensor:
    """The reference on the same inputs in float64."""
    inputs = [a.double() for a in (call["q"], call["k"] if k is None else k, call["v"], *extra)]
    return getattr(R, name)(*inputs, mask=call["mask"], gate=call["options"]["gate"], **structure)


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("seed", range(14))
class TestAgainstReference:
    """6 kinds of keys x 14 seeds x 6 functions: 504 random calls."""

    def test_simple_and_full(self, kind, seed):
        c = draw(random.Random(seed), kind)
        close(functional.aft_simple(c["q"], c["k"], c["v"], **c["options"]), exact("aft_simple", c))
        close(functional.aft_full(c["q"], c["k"], c["v"], c["w"], **c["options"]), exact("aft_full", c, c["w"]))

    def test_local(self, kind, seed):
        c = draw(random.Random(100 + seed), kind)
        T = c["q"].shape[1]
        for outside in ("zero", "none"):
            shape = {"window": c["rng"].choice([1, 2, 3, 9, 17, 40, T]), "outside": outside}
            close(
                functional.aft_local(c["q"], c["k"], c["v"], c["w"], **shape, **c["options"]),
                exact("aft_local", c, c["w"], **shape),
            )

    def test_pair_masks(self, kind, seed):
        c = draw(random.Random(200 + seed), kind)
        pairs = torch.rand(c["mask"].shape) < 0.5
        c["mask"] = c["mask"] & pairs
        close(
            functional.aft_full(c["q"], c["k"], c["v"], c["w"], attn_mask=pairs, **c["options"]),
            exact("aft_full", c, c["w"]),
        )

    def test_conv(self, kind, seed):
        c = draw(random.Random(300 + seed), kind)
        if c["q"].shape[1] > 20:  # the reference loops over pairs in Python
            c = {**c, **{name: c[name][:, :20] for name in "qkv"}, "mask": c["mask"][:, :20, :20]}
            c["options"] = {
                **c["options"],
                **({"key_mask": c["options"]["key_mask"][:, :20]} if "key_mask" in c["options"] else {}),
            }
        kernel, k = torch.rand(c["heads"], c["rng"].choice([1, 3, 9, 11])) * 120 - 60, c["k"][..., : c["heads"]]
        outside = c["rng"].choice(["zero", "none"])
        y = functional.aft_conv(c["q"], k, c["v"], kernel, outside=outside, **c["options"])
        close(y, exact("aft_conv", c, kernel, k=k, outside=outside, causal_taps=c["options"]["causal"]))
