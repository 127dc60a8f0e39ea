"""Try states of the process, of modules and of logits from which numbers came that mean something else."""

from __future__ import annotations

import torch

from tokenmix import build_mixer

from . import attempt


@attempt("1", "Relative biases that read queries beside rotary positions, all positions moved by 7")
def relative_bias_beside_rotary() -> str:
    torch.manual_seed(0)
    x, worst = torch.randn(1, 9, 16, dtype=torch.float64), {}
    for positions in ({"name": "rotary"}, {"name": "xpos"}):
        for bias in ({"name": "shaw", "max_distance": 3}, {"name": "cope", "longest": 4}, {"name": "cape"}):
            mixer = build_mixer("attention", 16, heads=2, causal=True, positions=positions, bias=bias).double()
            with torch.no_grad():
                for p in mixer.parameters():
                    p.add_(0.5 * torch.randn_like(p))
                moved = mixer(x, positions=torch.arange(9)[None] + 7)
                worst[f"{positions['name']} and {bias['name']}"] = float((moved - mixer(x)).abs().max())
    return "outputs move by " + ", ".join(f"{off:.1g} ({name})" for name, off in worst.items())
