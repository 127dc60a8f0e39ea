"""Byte-level language modelling on enwik8 (AFT, arXiv 2105.14103, Sec. 5.2): all rows of Tables 4, 5 and 6.

From the paper: 24 layers x 256 (or 12 x 512), MLP x4, pre-norm, learned positions, T = 1024, window 32, rank 256, AdamW
at 3e-3 with the warm-up schedule of Vaswani et al., weight decay 0.5 on linear weights, dropout 0.1, batch 128, 100
epochs.

Not in the paper: the length of the warm-up (4000 here, as in Vaswani et al.), AdamW's betas (torch's defaults here),
gradient clipping (not mentioned there; 1.0 here), Reformer's hashing (16 buckets, chunks of 64, 4 rounds here),
Performer's features (e ln e here, never redrawn), the Synthesizer's hidden layer (as wide as a head here).

``gpu`` is the paper's model for 20,000 steps of 32,768 bytes in bf16. ``smoke`` has a sixth of the layers and a
quarter of the width, 4 x 64 for 24 x 256, and takes about a minute; the rows of Table 4 read 256 bytes there, those
about windows and lengths as many as their names say. It shows that a row runs, but is no comparison with the paper.
"""

from __future__ import annotations

from ...models import LMConfig
from ...types import Spec
from ..data.corpora import ENWIK8_BOUNDS
from ..train import DataConfig
from ..train.config import OptimConfig, RunConfig, TrainConfig
from .recipe import Recipe, Row, shrink_spec

EPOCHS, BATCH = 100, 128
WINDOWS = {  # Table 5: window -> (train, test) bits per character
    0: (1.046, 1.209),
    1: (1.043, 1.205),
    2: (1.009, 1.176),
    4: (0.990, 1.165),
    8: (0.983, 1.162),
    32: (0.972, 1.154),
    64: (0.981, 1.160),
    128: (0.985, 1.165),
    256: (0.986, 1.164),
    512: (0.988, 1.171),
    1024: (0.991, 1.173),
}
LENGTHS = {1024: (0.972, 1.154), 2048: (0.951, 1.135), 4096: (0.945, 1.134)}  # Table 6
OTHERS: dict[str, tuple[Spec, int, int, float, float, float, float]] = {
    # Table 4: row -> (spec, layers, dim, train, test, iterations per second, GB per GPU on 8 V100)
    "transformer_12x512": ({"name": "attention", "heads": 8}, 12, 512, 0.977, 1.137, 1.42, 29.4),
    "transformer_24x256": ({"name": "attention", "heads": 4}, 24, 256, 1.039, 1.130, 1.57, 28.3),
    "reformer_12x512": (
        {"name": "reformer", "heads": 8, "buckets": 16, "chunk": 64, "rounds": 4},
        12,
        512,
        1.04,
        1.195,
        1.05,
        20.9,
    ),
    "synthesizer_dense_12x512": ({"name": "synthesizer_dense", "heads": 8}, 12, 512, 0.994, 1.298, 1.49, 29.9),
    "linear_transformer_12x512": ({"name": "linear", "heads": 8}, 12, 512, 0.981, 1.207, 1.46, 10.6),
    "performer_12x512": ({"name": "performer", "heads": 8}, 12, 512, 1.002, 1.199, 1.44, 10.1),
    "aft_local_32_12x512": ({"name": "aft_local", "window": 32, "rank": 256}, 12, 512, 0.854, 1.180, 1.85, 11.3),
    "aft_local_32_24x256": ({"name": "aft_local", "window": 32, "rank": 256}, 24, 256, 0.972, 1.154, 2.04, 11.2),
    "aft_simple_24x256": ({"name": "aft_simple"}, 24, 256, 1.046, 1.209, 2.61, 9.6),
}


def local(window: int) -> Spec:
    """Return AFT-local as in Table 5; window 0 is AFT-simple, whose row it repeats."""
    return {"name": "aft_local", "window": window, "rank": 256} if window else {"name": "aft_simple"}


def rows() -> dict[str, Row]:
    """Return every row by name."""
    found = {}
    for name, (spec, layers, dim, train, test, speed, memory) in OTHERS.items():
        printed = {"train": train, "test": test, "iterations_per_s": speed, "gb_per_gpu": memory}
        found[f"table4/{name}"] = Row(f"Table 4: {layers} layers x {dim}", (spec,), layers, dim, 1024, printed)
    for window, (train, test) in WINDOWS.items():
        found[f"table5/window_{window}"] = Row(
            f"Table 5: AFT-local, window {window}",
            (local(window),),
            24,
            256,
            1024,
            {"train": train, "test": test},
            ("window", "seq_len"),
        )
    for length, (train, test) in LENGTHS.items():
        found[f"table6/length_{length}"] = Row(
            f"Table 6: AFT-local-32, T = {length}",
            (local(32),),
            24,
            256,
            length,
            {"train": train, "test": test},
            ("seq_len",),
        )
    return found


def build(row: Row, size: str) -> RunConfig:
    """Return the config of a row at a size."""
    if size == "smoke":
        return _smoke(row)
    model = LMConfig(dim=row.dim, max_len=row.seq_len, mixers=row.mixers, layers=row.layers, dropout=0.1)
    data = DataConfig(source="enwik8", seq_len=row.seq_len)
    if size == "paper":
        steps = EPOCHS * (ENWIK8_BOUNDS[0] // row.seq_len) // BATCH
        loop = TrainConfig(
            steps=steps,
            batch_size=BATCH,
            log_every=100,
            eval_every=2000,
            save_every=1000,
            sample_bytes=512,
            eval_batch=32,
        )
        return RunConfig(model, data, OptimConfig(lr=3e-3, weight_decay=0.5, schedule="vaswani", warmup=4000), loop)
    batch = max(1, 32 * 1024 // row.seq_len)
    loop = TrainConfig(
        steps=20_000,
        batch_size=batch,
        precision="bf16",
        log_every=50,
        eval_every=2000,
        save_every=1000,
        sample_bytes=512,
        eval_bytes=500_000,
    )
    return RunConfig(model, data, OptimConfig(lr=3e-3, weight_decay=0.5, schedule="vaswani", warmup=2000), loop)


def _smoke(row: Row) -> RunConfig:
    seq_len = row.seq_len if row.keeps else row.seq_len // 4
    mixers = tuple(shrink_spec(spec, seq_len=seq_len, heads=4, rank=32) for spec in row.mixers)
    model = LMConfig(dim=row.dim // 4, max_len=seq_len, mixers=mixers, layers=row.layers // 6)
    loop = TrainConfig(
        steps=200,
        batch_size=max(1, 2048 // seq_len),
        eval_every=100,
        save_every=50,
        eval_bytes=20_000,
        sample_bytes=128,
    )
    return RunConfig(
        model,
        DataConfig(source="enwik8", seq_len=seq_len),
        OptimConfig(lr=3e-3, weight_decay=0.5, schedule="vaswani", warmup=50),
        loop,
    )


RECIPE = Recipe(
    "aft_enwik8",
    "AFT against Transformers on enwik8: Tables 4, 5 and 6 of the AFT paper",
    rows(),
    "table4/aft_local_32_24x256",
    build,
    {
        "table5/window_0": "table4/aft_simple_24x256",
        "table5/window_32": "table4/aft_local_32_24x256",
        "table6/length_1024": "table4/aft_local_32_24x256",
    },
)
