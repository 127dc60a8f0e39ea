"""Multi-query associative recall and copying: what a mixer remembers, against the bytes of its state.

``--data recall`` (the default) is the task of Arora et al. 2023 (arXiv 2312.04927), ``--data copy`` a string and its
copy. ``paper`` has the sizes of Arora et al.'s hardest setting: 2 layers, sequences of 512 tokens with 64 pairs, a
vocabulary of 8,192. Its width is 512 here, the largest that they train; the optimiser and the batches are ours.

All sizes have the blocks of today (``in_shell(..., "modern")``). ``smoke``: 2 layers x 64.
"""

from __future__ import annotations

from typing import Any

from ..models import LMConfig, in_shell
from ..train.config import OptimConfig, RunConfig, SyntheticDataConfig, TrainConfig
from .recipe import Recipe, Row, shrink_spec

LAYERS, DIM, SEQ_LEN, HEADS = 2, 512, 512, 4
SIZES: dict[str, dict[str, int]] = {
    "smoke": {"dim": 64, "seq_len": 128, "pairs": 16, "vocab": 128, "steps": 800, "batch_size": 32},
    "gpu": {"dim": 256, "seq_len": 256, "pairs": 32, "vocab": 1024, "steps": 20_000, "batch_size": 128},
    "paper": {"dim": DIM, "seq_len": SEQ_LEN, "pairs": 64, "vocab": 8192, "steps": 50_000, "batch_size": 128},
}


def row(about: str, *mixers: dict[str, Any]) -> Row:
    """Return a row with these mixers."""
    return Row(about, mixers, LAYERS, DIM, SEQ_LEN)


ROTARY = {"name": "rotary", "base": 10_000.0}  # half of the features hardly turn over the sequence, and match keys
ATTENTION = {"name": "attention", "heads": HEADS, "positions": ROTARY, "qk_norm": "rms"}
ROWS = {
    "attention": row("softmax attention, the baseline", ATTENTION),
    "aft_simple": row("AFT-simple", {"name": "aft_simple"}),
    "aft_local": row("AFT-local, window 32", {"name": "aft_local", "window": 32, "rank": 32}),
    "aft_full": row("AFT-full, factorised bias", {"name": "aft_full", "rank": 32}),
    "aft_conv": row("causal AFT-conv, filters of 31", {"name": "aft_conv", "heads": 4, "kernel_size": 31}),
    "aft_forget": row("AFT-forget", {"name": "aft_forget", "heads": HEADS}),
    "aft_pairs": row("AFT-pairs, rank 4", {"name": "aft_pairs", "heads": HEADS, "rank": 4}),
    "aft_reach": row("AFT-reach, 8 decays", {"name": "aft_reach", "heads": HEADS, "reaches": 8}),
    "hydra": row("Hydra attention, cosine kernel", {"name": "hydra"}),
    "linear": row("linear attention, elu + 1", {"name": "linear", "heads": HEADS}),
    "performer": row("Performer, positive orthogonal features", {"name": "performer", "heads": HEADS}),
    "rfa": row("random feature attention with gates", {"name": "rfa", "heads": HEADS, "gate": True}),
    "local": row("softmax attention in a window of 32", {"name": "local", "window": 32, "heads": HEADS}),
}


def build(row: Row, size: str) -> RunConfig:
    """Return the config of a row at a size."""
    at = SIZES[size]
    mixers = tuple(shrink_spec(spec, seq_len=at["seq_len"], heads=HEADS, rank=None) for spec in row.mixers)
    model = LMConfig(dim=at["dim"], max_len=at["seq_len"], mixers=mixers, layers=row.layers, vocab=at["vocab"])
    data = SyntheticDataConfig(seq_len=at["seq_len"], pairs=at["pairs"])
    optim = OptimConfig(
        name="muon",
        lr=0.012,
        muon_lr=0.02,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        schedule="wsd",
        decay=0.6,
        min_lr_ratio=0.0,
        warmup=20,
    )
    every = at["steps"] // 4
    loop = TrainConfig(
        steps=at["steps"],
        batch_size=at["batch_size"],
        eval_every=every,
        eval_batch=64,
        save_every=every,
    )
    return RunConfig(in_shell(model, "modern"), data, optim, loop)


RECIPE = Recipe(
    "recall",
    "associative recall and copying, made as training goes on: what mixers remember",
    ROWS,
    "attention",
    build,
)
