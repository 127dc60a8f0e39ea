"""Train small hybrids of transformers with their own linear attention and on our kernels, from equal weights.

    python -m benchmarks.hybrid_training                       # print the tables
    python -m benchmarks.hybrid_training --record              # and keep them in results/hybrid_training.json
    python -m benchmarks.hybrid_training --models kimi_linear --profile   # where a step of ours spends its time

Each model has three layers of linear attention to one of softmax attention and about 10 M parameters, in the
proportions of the default config; MLPs are dense. The other model is a copy whose layers of linear attention run on the
C kernels (``hosts.cpu_kernels``); everything else stays transformers' own. Both take a step of AdamW on the same bytes
of docs/ in turns, on two threads.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.hosts import cpu_kernels
from tokenmix.lab.bench.roofline import machine
from tokenmix.system.torchvision import ensure_torchvision

RECORD = Path(__file__).parent / "results" / "hybrid_training.json"
DOCS = Path(__file__).parents[1] / "docs"
LENGTH, BATCH, DIM = 512, 2, 256
KINDS = ("linear_attention",) * 3 + ("full_attention",)


def qwen3_next() -> nn.Module:
    """Return Qwen3-Next, Gated DeltaNet beside gated attention: 2 heads of keys, 4 of values, 128 features."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=256,
        hidden_size=DIM,
        intermediate_size=640,
        num_hidden_layers=12,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=0,
        layer_types=[*KINDS] * 3,
        pad_token_id=None,
    )
    return Qwen3NextForCausalLM(config)


def kimi_linear() -> nn.Module:
    """Return Kimi Linear, Kimi Delta Attention of 4 heads of 128 features beside multi-head latent attention."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    config = KimiLinearConfig(
        vocab_size=256,
        hidden_size=DIM,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
        linear_num_heads=4,
        mlp_layer_types=["dense"] * 8,
        layer_types=[*KINDS] * 2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return KimiLinearForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"qwen3_next": qwen3_next, "kimi_linear": kimi_linear}


def pair(name: str) -> dict[str, Any]:
    """Return transformers' model, and its copy whose layers of linear attention run on the kernels."""
    torch.manual_seed(0)
    theirs = MODELS[name]()
    ours = copy.deepcopy(theirs)
    cpu_kernels(ours)
    return {"transformers": theirs, "tokenmix": ours}


def text() -> Tensor:
    """Return the bytes of the documentation."""
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sorted(DOCS.rglob("*.md")))), dtype=torch.uint8)


def stepper(model: nn.Module, data: Tensor) -> Callable[[int], float]:
    """Return a call that takes one step of training on the rows of its number, and gives the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(i: int) -> float:
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=torch.Generator().manual_seed(i))
        rows = torch.stack([data[s : s + LENGTH] for s in starts]).long()
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def compare(name: str, steps: int) -> dict[str, Any]:
    """Train both models in turns."""
    models, data = pair(name), text()
    takes = {who: stepper(model, data) for who, model in models.items()}
    losses: dict[str, list[float]] = {who: [] for who in takes}
    times: dict[str, list[float]] = {who: [] for who in takes}
    for i in range(steps):
        for who, step in takes.items():
            start = time.perf_counter()
            losses[who].append(step(i))
            times[who].append(time.perf_counter() - start)
    pairs = list(zip(times["transformers"][1:], times["tokenmix"][1:], strict=True))
    apart = [abs(a - b) for a, b in zip(losses["transformers"], losses["tokenmix"], strict=True)]
    return {
        "model": name,
        "parameters": sum(p.numel() for p in models["tokenmix"].parameters()),
        "tokens": LENGTH * BATCH,
        "steps": steps,
        "tokens_per_s": {who: round(LENGTH * BATCH / min(each[1:])) for who, each in times.items()},
        "ratio_of_least": round(min(a for a, _ in pairs) / min(b for _, b in pairs), 2),
        "median_of_paired_ratios": round(median(a / b for a, b in pairs), 2),
        "largest_difference_of_losses": max(apart),
        "losses": {who: [round(x, 5) for x in each] for who, each in losses.items()},
    }


def profile(name: str, steps: int) -> None:
    """Print the operators of steps of ours by their own time."""
    step = stepper(pair(name)["tokenmix"], text())
    step(0)
    with torch.profiler.profile() as found:
        for i in range(steps):
            step(i)
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=32, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    ensure_torchvision()
    torch.set_num_threads(given.threads)
    if given.profile:
        for name in given.models:
            profile(name, given.steps)
        return
    print("| model | parameters | transformers, tokens/s | ours | ratio | of paired steps | losses differ by |")
    print("|---|---|---|---|---|---|---|")
    kept = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else []
    rows = {row["model"]: row for row in kept}
    for name in given.models:
        row = rows[name] = compare(name, given.steps)
        speed = row["tokens_per_s"]
        cells = [name, f"{row['parameters']:,}", speed["transformers"], speed["tokenmix"], row["ratio_of_least"]]
        cells += [row["median_of_paired_ratios"], f"{row['largest_difference_of_losses']:.1e}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        if given.record:
            found = {"machine": machine(), "threads": given.threads, "rows": list(rows.values())}
            RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
