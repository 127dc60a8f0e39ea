"""Time a decoder that reads long inputs through mixers, in milliseconds per token of BART's ``generate()``.

Its cross-attention is replaced, and all variants run in one process.

    python benchmarks/generate_across.py [--lengths 256 1024 ...] [--new 24] [--threads 2]

One BART-shaped model with random weights. Its cross-attention is softmax attention of transformers, or a mixer whose
keys and values, or their sums, are kept in the cache; one row projects the input again at each step, as all once did.
Written to benchmarks/results/generate_across.json after each length.
"""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from generate_lengths import Clock
from tokenmix.hosts.surgery import cache, replace_mixers
from tokenmix.lab.bench.roofline import machine
from whole_models import RESULTS

import transformers  # isort: skip  (after the adapter, which repairs torchvision)

LENGTHS = (256, 1024, 4096, 16384)
WIDTHS = {
    "d_model": 512,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
}
SIZES: dict[str, Any] = {
    **WIDTHS,
    "encoder_layers": 1,
    "decoder_layers": 6,
    "vocab_size": 1000,
    "eos_token_id": None,
    "forced_eos_token_id": None,
}
MIXERS = ("attention", "linear", "hydra", "aft_simple")
ANEW = "aft_simple, input projected anew"


@contextmanager
def forgetful(on: bool) -> Any:
    """Remove the place for a context from all caches while inside."""
    kept = cache.context_layer
    cache.context_layer = (lambda *args: None) if on else kept
    try:
        yield
    finally:
        cache.context_layer = kept


@torch.no_grad()
def per_token(model: Any, length: int, new: int) -> float:
    """Measure milliseconds from token to token, after the first two."""
    torch.manual_seed(0)
    read = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.randn(1, length, SIZES["d_model"]))
    clock = Clock()
    model.generate(
        encoder_outputs=read,
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        num_beams=1,
        stopping_criteria=[clock],
    )
    return median(after - before for before, after in pairwise(clock.at[2:])) * 1e3


def at_length(models: dict[str, Any], length: int, new: int, rounds: int) -> dict[str, float]:
    """Return name -> ms per token; the models take turns, and the best turn counts."""
    turns: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            with forgetful(name == ANEW):
                turns[name].append(per_token(model, length, new))
    return {name: min(those) for name, those in turns.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    parser.add_argument("--new", type=int, default=24, help="tokens written")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    config = transformers.BartConfig(**SIZES, max_position_embeddings=max(64, given.new + 2))
    models: dict[str, Any] = {"transformers": transformers.BartForConditionalGeneration(config).eval()}
    models |= {name: replace_mixers(models["transformers"], {"*encoder_attn": name}, seed=0)[0] for name in MIXERS}
    models[ANEW] = models["aft_simple"]
    found: dict[str, Any] = {
        "machine": machine(),
        "threads": given.threads,
        "model": SIZES,
        "new": given.new,
        "ms_per_token": {},
    }
    for length in given.lengths:
        found["ms_per_token"][length] = rows = at_length(models, length, given.new, given.rounds)
        print(f"{length:6}  " + "  ".join(f"{name} {ms:.2f}" for name, ms in rows.items()), flush=True)
        RESULTS.joinpath("generate_across.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
