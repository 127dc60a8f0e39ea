"""Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927): what a mixer remembers, against its state.

``paper`` has the longest sequences of Arora et al.: 512 tokens with 64 pairs of a vocabulary of 8,192, and their
2 layers. The width of 512, the optimiser and the batches are ours.

All sizes have the blocks of today (``in_shell(..., "modern")``). ``smoke``: 2 layers x 64; hybrids have one layer of
each kind at least.
"""

from __future__ import annotations

from dataclasses import replace

from ...models import LMConfig, in_shell
from ...types import Spec
from ..train import SyntheticDataConfig
from ..train.config import RunConfig, TrainConfig
from .recipe import MUON, Recipe, Row, shrink_spec

LAYERS, DIM, SEQ_LEN, HEADS = 2, 512, 512, 8
SHAPES: dict[str, dict[str, int]] = {
    "smoke": {"dim": 64, "heads": 2, "seq_len": 64, "pairs": 12, "vocab": 64, "steps": 800, "batch_size": 32},
    "gpu": {"dim": 256, "heads": 4, "seq_len": 256, "pairs": 32, "vocab": 1024, "steps": 20_000, "batch_size": 64},
    "paper": {
        "dim": DIM,
        "heads": HEADS,
        "seq_len": SEQ_LEN,
        "pairs": 64,
        "vocab": 8192,
        "steps": 50_000,
        "batch_size": 64,
    },
}
OPTIM = replace(MUON, lr=0.0024, muon_lr=0.004)  # a muon_lr of 0.02 leaves attention guessing among a row's values


def row(about: str, *mixers: Spec) -> Row:
    """Return a row with these mixers, and as many layers at least."""
    return Row(about, mixers, max(LAYERS, len(mixers)), DIM, SEQ_LEN)


ROTARY = {"name": "rotary", "base": 10_000.0}  # half of the features hardly turn over the sequence, and match keys
ATTENTION = {"name": "attention", "heads": HEADS, "positions": ROTARY, "qk_norm": "rms"}
DELTA = {"name": "gated_delta", "heads": HEADS}
ROWS = {
    "attention": row("softmax attention, the baseline", ATTENTION),
    "aft_simple": row("AFT-simple", {"name": "aft_simple"}),
    "aft_local": row("AFT-local, window 16", {"name": "aft_local", "window": 16, "rank": 16}),
    "aft_full": row("AFT-full, factorised bias", {"name": "aft_full", "rank": 32}),
    "aft_conv": row("causal AFT-conv, filters of 31", {"name": "aft_conv", "heads": HEADS, "kernel_size": 31}),
    "aft_forget": row("AFT-forget", {"name": "aft_forget"}),
    "aft_pairs": row("AFT-pairs, rank 4", {"name": "aft_pairs", "heads": HEADS, "rank": 4}),
    "aft_reach": row("AFT-reach, 8 decays", {"name": "aft_reach", "heads": HEADS, "reaches": 8}),
    "delta": row("DeltaNet", {**DELTA, "decay": None, "gate": None}),
    "gated_delta": row("Gated DeltaNet", DELTA),
    "kda": row("Kimi Delta Attention, a decay per feature", {**DELTA, "decay": "feature", "gate": "sigmoid"}),
    "mamba2": row("Mamba-2, a state as large as Gated DeltaNet's", {"name": "mamba2", "heads": HEADS, "state_dim": 32}),
    "short_conv": row("gated convolutions of 3 tokens, as in LFM2", {"name": "short_conv"}),
    "hybrid_delta_3": row("three Gated DeltaNet layers, then one of attention", *[DELTA] * 3, ATTENTION),
    "hybrid_delta_7": row("seven Gated DeltaNet layers, then one of attention", *[DELTA] * 7, ATTENTION),
    "hydra": row("Hydra attention, cosine kernel", {"name": "hydra"}),
    "linear": row("linear attention, elu + 1", {"name": "linear", "heads": HEADS}),
    "performer": row("Performer, positive orthogonal features", {"name": "performer", "heads": HEADS}),
    "rfa": row("random feature attention with gates", {"name": "rfa", "heads": HEADS, "gate": True}),
    "local": row("softmax attention in a window of 16", {"name": "local", "window": 16, "heads": HEADS}),
}


def build(row: Row, size: str) -> RunConfig:
    """Return the config of a row at a size."""
    at = SHAPES[size]
    mixers = tuple(shrink_spec(spec, seq_len=at["seq_len"], heads=at["heads"], rank=None) for spec in row.mixers)
    model = LMConfig(dim=at["dim"], max_len=at["seq_len"], mixers=mixers, layers=row.layers, vocab=at["vocab"])
    data = SyntheticDataConfig(seq_len=at["seq_len"], pairs=at["pairs"])
    every = at["steps"] // 4
    loop = TrainConfig(
        steps=at["steps"], batch_size=at["batch_size"], eval_every=every, eval_batch=64, save_every=every
    )
    return RunConfig(in_shell(model, "modern"), data, OPTIM, loop)


RECIPE = Recipe(
    "recall",
    "associative recall, made as training goes on: what mixers remember",
    ROWS,
    "attention",
    build,
)
