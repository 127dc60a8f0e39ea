"""Measure ``generate()`` with a constant state: time and memory at prompts of 1k to 32k tokens.

AFT-local is compared with softmax attention, ours and theirs, in one process.

    python benchmarks/generate_lengths.py [--lengths 1024 4096 ...] [--new 32] [--threads 2]

Two models of the same size (``tokenmix.hosts.huggingface``) and transformers' own Llama of that size, with random
weights: seconds until the first token, milliseconds per token written after it, peak memory of a whole call, and the
bytes of the cache at its end. Written to benchmarks/results/generate_lengths.json after each length.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from tokenmix import state_bytes
from tokenmix.hosts.huggingface import TokenMixConfig, TokenMixForCausalLM
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.bench.timing import peak_memory
from whole_models import RESULTS

import transformers  # isort: skip  (after the adapter, which repairs torchvision)

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "positions": None,
}
MIXERS: dict[str, dict[str, Any]] = {
    "attention": {"name": "attention", "positions": {"name": "rotary"}},
    "aft_local": {"name": "aft_local", "window": 128, "rank": 16},
}


def llama(longest: int) -> Any:
    """Build transformers' own Llama, with its softmax attention and cache.

    It has as many layers, features, heads and, but for a few, parameters; its MLP has three matrices.
    """
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = transformers.LlamaConfig(
        **sizes, intermediate_size=SIZES["hidden_size"] * 8 // 3, max_position_embeddings=longest, eos_token_id=None
    )
    return transformers.LlamaForCausalLM(config).eval()


class Clock:
    """Record when each token has been written, as a stopping criterion that never stops."""

    def __init__(self) -> None:
        self.at = [time.perf_counter()]

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Return that no sequence is done."""
        self.at.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)


@torch.no_grad()
def once(model: Any, prompt: torch.Tensor, new: int) -> dict[str, Any]:
    """Measure one call of ``generate()``.

    Returns seconds until the first token, milliseconds from token to token after it (median), and what the cache holds
    at the end.
    """
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "return_dict_in_generate": True}
    clock = Clock()
    done = model.generate(prompt, max_new_tokens=1 + new, min_new_tokens=1 + new, stopping_criteria=[clock], **options)
    gaps = [after - before for before, after in pairwise(clock.at)]
    held = sum(
        state_bytes(layer.state if hasattr(layer, "state") else (layer.keys, layer.values))
        for layer in done.past_key_values.layers
    )
    return {"prompt_s": gaps[0], "ms_per_token": median(gaps[1:]) * 1e3, "cache_bytes": held}


def at_length(models: dict[str, Any], length: int, new: int, rounds: int) -> dict[str, Any]:
    """Return name -> figures; the models take turns, and the median of the turns counts."""
    prompt = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(0))
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            turns[name].append(once(model, prompt, new))
    found = {
        name: {key: sorted(t[key] for t in those)[len(those) // 2] for key in those[0]} for name, those in turns.items()
    }
    for name, model in models.items():
        found[name]["peak_MiB"] = (peak_memory(lambda model=model: once(model, prompt, 1)) or 0) / 2**20
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--new", type=int, default=32, help="tokens written after the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    longest = max(given.lengths) + given.new + 1
    models: dict[str, Any] = {"llama": llama(longest)}
    models |= {
        name: TokenMixForCausalLM(TokenMixConfig(**SIZES, max_position_embeddings=longest, mixers=[spec])).eval()
        for name, spec in MIXERS.items()
    }
    found: dict[str, Any] = {
        "machine": machine(),
        "threads": given.threads,
        "model": SIZES,
        "mixers": MIXERS,
        "new": given.new,
        "lengths": {},
    }
    for length in given.lengths:
        found["lengths"][length] = rows = at_length(models, length, given.new, given.rounds)
        for name, row in rows.items():
            print(
                f"{length:6} {name:10} {row['prompt_s']:8.3f} s prompt  {row['ms_per_token']:8.2f} ms per token", end=""
            )
            print(f"  {row['peak_MiB']:7.0f} MiB  cache {row['cache_bytes'] / 2**20:8.3f} MiB", flush=True)
        RESULTS.joinpath("generate_lengths.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
