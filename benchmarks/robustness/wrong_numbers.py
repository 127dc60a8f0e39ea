"""Try states of the process, of modules and of logits from which numbers came that mean something else."""

from __future__ import annotations

import copy
import threading

import torch
from torch.utils.checkpoint import checkpoint

import tokenmix
from tokenmix import build_mixer
from tokenmix.models import LM, LMConfig, Seq2Seq, Seq2SeqConfig

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


@attempt("2", "Text and translations from a model whose weights are NaN, and from a temperature of 1e-30")
def generate_from_nan() -> str:
    mixers, said = ({"name": "aft_simple"},), []

    def attempts(model, name: str, *given, **options) -> None:
        try:
            said.append(f"{name} writes {model.generate(*given, **options).tolist()[0]}")
        except Exception as why:
            said.append(f"{name}: {type(why).__name__} {str(why)[:70]}")

    torch.manual_seed(0)
    lm = LM(LMConfig(dim=16, max_len=32, mixers=mixers)).eval()
    attempts(lm, "temperature 1e-30", torch.tensor([[65, 66]]), 3, temperature=1e-30)
    torch.nn.init.constant_(lm.embed.weight, float("nan"))
    attempts(lm, "greedy", torch.tensor([[65, 66]]), 3, temperature=0.0)
    pairs = Seq2Seq(Seq2SeqConfig(dim=8, max_len=8, mixers=mixers, vocab=5, start=0, end=1))
    torch.nn.init.constant_(pairs.embed.weight, float("nan"))
    attempts(pairs, "beams", torch.tensor([[2, 3]]), 3, beams=3)
    return "; ".join(said)


@attempt("3", "use_backend in two threads whose blocks overlap")
def backends_of_two_threads() -> str:
    first, second = threading.Event(), threading.Event()

    def one() -> None:
        with tokenmix.use_backend("cpu"):
            first.set()
            second.wait()

    def two() -> None:
        first.wait()
        with tokenmix.use_backend("eager"):
            second.set()
            threads[0].join()

    threads = [threading.Thread(target=each) for each in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    return (
        f"after both: aft_simple in float64 gives {tuple(tokenmix.functional.aft_simple(x, x, x, causal=True).shape)}"
    )


@attempt("4", "Centroids and running means after one training step, with and without gradient checkpointing")
def checkpointed_side_effects() -> str:
    said = []
    x = torch.randn(2, 16, 8, requires_grad=True)
    for name, options in (("routing", {"heads": 2}), ("lambda", {"heads": 2, "max_len": 16}), ("pct_attention", {})):
        torch.manual_seed(0)
        plain = build_mixer(name, 8, **options).train()
        again = copy.deepcopy(plain)
        plain(x).sum().backward()
        checkpoint(again, x, use_reentrant=False).sum().backward()
        pairs = zip(plain.buffers(), again.buffers(), strict=True)
        said.append(f"{name} differs by {max(float((a - b).abs().max()) for a, b in pairs):.1g}")
    return ", ".join(said)
