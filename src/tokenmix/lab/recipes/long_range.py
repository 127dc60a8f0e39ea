"""Classes of long sequences, side by side, after the Long Range Arena (Tay et al. 2020, arXiv 2011.04006).

An encoder reads ListOps (the default), two documents (``--data retrieval``) or the pixels of an image (``--data
pathfinder``), one token for each character, and tells the class from the mean of its tokens; see ``data.LONG_SETS``.

``paper`` has the length of that benchmark's ListOps, 2,000 tokens; one layer count and width, the optimiser and the
number of steps are ours. Documents are read in one sequence here, there one by one. ``smoke``: 2 layers x 64.

Gated DeltaNet and Mamba-2 have only a causal form, and an encoder sees both sides: they have no row.
"""

from __future__ import annotations

from dataclasses import replace

from ...models import EncoderConfig, in_shell
from ...types import Options
from ..train import LabelDataConfig
from ..train.config import RunConfig, TrainConfig
from .recipe import MUON, Recipe, Row, shrink_spec

LAYERS, DIM, HEADS, LENGTH = 4, 512, 8, 2005
VOCAB = 260  # a token for each byte and four special ones: no merges
SHAPES: dict[str, Options] = {
    "smoke": {"dim": 64, "heads": 2, "layers": 2, "length": 261, "steps": 500, "batch": 16},
    "gpu": {"dim": 256, "heads": 4, "layers": 4, "length": 1029, "steps": 10_000, "batch": 64},
    "paper": {"dim": DIM, "heads": HEADS, "layers": LAYERS, "length": LENGTH, "steps": 50_000, "batch": 32},
}
OPTIM = replace(MUON, lr=0.004, muon_lr=0.01)


def row(about: str, **mixer: object) -> Row:
    """Return a row with this mixer in all layers."""
    return Row(about, (mixer,), LAYERS, DIM, LENGTH)


ROWS = {
    "attention": row("softmax attention, the baseline", name="attention", heads=HEADS),
    "aft_full": row("AFT-full, factorised bias", name="aft_full", rank=32),
    "aft_local": row("AFT-local, window 16", name="aft_local", window=16, rank=32),
    "aft_conv": row("AFT-conv over the sequence, filters of 15", name="aft_conv", heads=HEADS, kernel_size=15),
    "aft_simple": row("AFT-simple", name="aft_simple"),
    "aft_forget": row("AFT-forget", name="aft_forget"),
    "hydra": row("Hydra attention, cosine kernel", name="hydra"),
    "linear": row("linear attention, elu + 1", name="linear", heads=HEADS),
    "performer": row("Performer, positive orthogonal features", name="performer", heads=HEADS),
    "linformer": row("Linformer", name="linformer", heads=HEADS),
    "local": row("softmax attention in a window of 16", name="local", window=16, heads=HEADS),
    "external": row("external attention, 64 slots", name="external", slots=64),
    "reformer": row("Reformer", name="reformer", heads=HEADS),
    "sinkhorn": row("Sinkhorn attention", name="sinkhorn", heads=HEADS),
    "longformer": row("Longformer", name="longformer", heads=HEADS),
    "bigbird": row("BigBird", name="bigbird", heads=HEADS),
    "synthesizer_dense": row("Synthesizer, dense", name="synthesizer_dense", heads=HEADS),
}


def build(row: Row, size: str) -> RunConfig:
    """Return the config of a row at a size."""
    at = SHAPES[size]
    mixers = tuple(shrink_spec(spec, seq_len=at["length"], heads=at["heads"], rank=None) for spec in row.mixers)
    model = EncoderConfig(
        dim=at["dim"], max_len=at["length"], mixers=mixers, layers=at["layers"], vocab=VOCAB, classes=10
    )
    every = at["steps"] // 4
    loop = TrainConfig(
        steps=at["steps"], batch_size=at["batch"], eval_every=every, eval_batch=64, eval_texts=1000, save_every=every
    )
    data = LabelDataConfig("listops", max_tokens=at["length"])
    return RunConfig(in_shell(model, "modern"), data, OPTIM, loop)


RECIPE = Recipe(
    "long_range", "classes of long sequences, drawn here: ListOps, retrieval, paths", ROWS, "attention", build
)
