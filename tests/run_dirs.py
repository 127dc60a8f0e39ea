"""Run directories for the tests of the report: written by a real, tiny training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenmix.lab.train import DataConfig, RunConfig, TrainConfig, train
from tokenmix.models import LMConfig

SPECS: dict[str, tuple[dict[str, Any], ...]] = {
    "attention": ({"name": "attention", "heads": 2},),
    "local": ({"name": "aft_local", "window": 4, "rank": 2},),
    "mixed": (
        {"name": "aft_full", "rank": None},
        {"name": "aft_conv", "heads": 2, "kernel_size": 5},
        {"name": "aft_simple"},
    ),
}

KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "routing": ({"name": "routing", "heads": 2, "clusters": 3, "window": 8},),
    "external": ({"name": "external", "slots": 8},),
    "gmlp": ({"name": "gmlp"},),
    "synthesizer_mixture": ({"name": "synthesizer_mixture", "heads": 2},),
    "transformer_xl": ({"name": "transformer_xl", "heads": 2},),
    "pooling": ({"name": "pooling", "window": 3},),
}


def tiny_run(folder: Path, name: str) -> Path:
    """Train one of ``SPECS`` or ``KINDS`` for 20 steps on a small text. Returns the run directory."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        corpus.write_bytes("To be, or not to be: that is the <question>, née &amp; naïve.\n".encode() * 150)
    config = RunConfig(
        model=LMConfig(dim=16, max_len=48, mixers={**SPECS, **KINDS}[name]),
        data=DataConfig(source=str(corpus), seq_len=48),
        train=TrainConfig(
            steps=20, batch_size=2, log_every=2, eval_every=10, save_every=10, sample_bytes=16, device="cpu"
        ),
    )
    train(config, folder / name)
    return folder / name
