"""Measure how far the future reaches the past in every causal mixer, and whether past and present reach the output.

    python benchmarks/leaks.py

Default options, 64 features, 96 tokens, float32. Tokens from p on are replaced by numbers of size 1, 100 and 1e4, for
five p; the figure is the largest change of an earlier output relative to the largest earlier output. Below it stands
the smallest change of output p when token p, or all tokens before it, are replaced.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmix import MIXERS
from tokenmix.mixers import example_mixer

DIM, T = 64, 96
CUTS, SIZES, LIMIT = (1, 17, 48, 80, T - 1), (1.0, 100.0, 1e4), 1e-6


def noise(seed: int) -> Tensor:
    """Return standard normal tokens."""
    return torch.randn(2, T, DIM, generator=torch.Generator().manual_seed(seed))


def change(a: Tensor, b: Tensor) -> float:
    """Return the largest difference over the largest number."""
    return float((a - b).abs().max() / b.abs().max())


@torch.no_grad()
def leak(mixer: torch.nn.Module) -> float:
    """Return the worst change of the past."""
    x, worst = noise(1), 0.0
    want = mixer(x)
    for p in CUTS:
        for size in SIZES:
            other = torch.cat([x[:, :p], size * noise(2)[:, p:]], 1)
            worst = max(worst, change(mixer(other)[:, :p], want[:, :p]))
    return worst


@torch.no_grad()
def reach(mixer: torch.nn.Module, *, present: bool) -> float:
    """Return the smallest change of an output when its own token, or all before it, are replaced."""
    x, least = noise(1), float("inf")
    want = mixer(x)
    for p in CUTS:
        tokens = slice(p, p + 1) if present else slice(0, p)
        other = x.clone()
        other[:, tokens] = noise(3)[:, tokens]
        least = min(least, change(mixer(other)[:, p], want[:, p]))
    return least


def main() -> None:
    """Print the table; exit with 1 where anything leaks."""
    print(f"{'mixer':30} {'future reaches past':>20} {'present reaches':>16} {'past reaches':>13}")
    worst = 0.0
    for name, cls in MIXERS.items():
        if not cls.facts.causal:
            continue
        torch.manual_seed(0)
        mixer = example_mixer(name, DIM, T=T).eval()
        leaked = leak(mixer)
        worst = max(worst, leaked)
        flag = "" if leaked <= LIMIT else "   LEAKS"
        print(f"{name:30} {leaked:20.1e} {reach(mixer, present=True):16.1e} {reach(mixer, present=False):13.1e}{flag}")
    print(f"worst {worst:.1e}")
    raise SystemExit(0 if worst <= LIMIT else 1)


if __name__ == "__main__":
    main()
