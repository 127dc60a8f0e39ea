"""Pairs of texts with an encoder-decoder: translation, summaries, dialogue.

``translation`` takes any parallel text: ``--data FOLDER`` with train.en, train.de, valid.en and so on, such as Multi30k
(29,000 captions). ``paper`` is the base Transformer of Vaswani et al. 2017 (arXiv 1706.03762), as the Synthesizer paper
trains it on WMT'14 (Tay et al. 2020, arXiv 2005.00743): 6 + 6 layers of 512 features; its sources and targets are at
most 256 tokens here, which is what the counts of that paper imply. ``grammar`` trains in two minutes on a small
grammar of English and Spanish, and ``docstrings`` summarises the functions of Python's standard library.

``dialogue`` answers in a dialogue, of files in the form of PersonaChat, and ``summaries`` shortens articles, of tables
with the columns article and highlights such as CNN/DailyMail. The size at which the Synthesizer paper trains these two
is not known here: ``paper`` is the size of its translations, that of T5-small too, with sources of up to 512 tokens.

A row names the mixer over the source and over the target. The decoder reads the source by softmax attention in all
rows, as in the paper.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...models import Seq2SeqConfig
from ...types import Options, Spec
from ..train import PairDataConfig
from ..train.config import OptimConfig, RunConfig, TrainConfig
from .recipe import MUON, Recipe, Row, shrink_spec

LAYERS, DIM, HEADS, LENGTH = 6, 512, 8, 256


def row(about: str, **mixer: object) -> Row:
    """Return a row with this mixer over source and target."""
    return Row(about, (mixer,), LAYERS, DIM, LENGTH)


def mixture(*parts: str) -> Spec:
    """Return a Synthesizer that mixes these logits."""
    return {"name": "synthesizer_mixture", "parts": list(parts), "heads": HEADS}


ROWS = {
    "attention": row("softmax attention, the baseline", name="attention", heads=HEADS),
    "synthesizer_random": row("Synthesizer, random (R)", name="synthesizer_random", heads=HEADS),
    "synthesizer_fixed": row("Synthesizer, random and fixed", name="synthesizer_random", heads=HEADS, trainable=False),
    "synthesizer_dense": row("Synthesizer, dense (D)", name="synthesizer_dense", heads=HEADS),
    "random_vanilla": row("Synthesizer, random + dot products (R+V)", **mixture("random", "attention")),
    "dense_vanilla": row("Synthesizer, dense + dot products (D+V)", **mixture("dense", "attention")),
    "random_dense": row("Synthesizer, random + dense (R+D)", **mixture("random", "dense")),
    "factorized_random": row("Synthesizer, factorised random", name="synthesizer_factorized_random", heads=HEADS),
    "factorized_dense": row("Synthesizer, factorised dense", name="synthesizer_factorized_dense", heads=HEADS),
    "lightconv": row("lightweight convolution of 7", name="lightconv", heads=HEADS, kernel_size=7),
    "dynamicconv": row("dynamic convolution of 7", name="dynamicconv", heads=HEADS, kernel_size=7),
    "aft_simple": row("AFT-simple", name="aft_simple"),
    "aft_local": row("AFT-local, window 16", name="aft_local", window=16, rank=32),
    "aft_full": row("AFT-full, factorised bias", name="aft_full", rank=32),
    "hydra": row("Hydra attention, cosine kernel", name="hydra"),
    "linear": row("linear attention, elu + 1", name="linear", heads=HEADS),
}
SHAPES: dict[str, dict[str, Options]] = {
    "translation": {
        "smoke": {"dim": 128, "heads": 4, "layers": 3, "vocab": 6000, "length": 64, "steps": 2500, "batch": 128},
        "gpu": {"dim": 256, "heads": 4, "layers": 4, "vocab": 8000, "length": 64, "steps": 8000, "batch": 256},
        "paper": {"dim": DIM, "heads": HEADS, "layers": LAYERS, "vocab": 37_000, "length": LENGTH, "steps": 100_000},
    },
    "grammar": {
        "smoke": {"dim": 48, "heads": 4, "layers": 2, "vocab": 512, "length": 24, "steps": 1500, "batch": 32},
        "gpu": {"dim": 128, "heads": 4, "layers": 2, "vocab": 512, "length": 24, "steps": 2000, "batch": 64},
        "paper": {"dim": 256, "heads": 8, "layers": 3, "vocab": 512, "length": 24, "steps": 4000, "batch": 64},
    },
    "docstrings": {
        "smoke": {"dim": 128, "heads": 4, "layers": 3, "vocab": 6000, "length": 192, "steps": 1500, "batch": 32},
        "gpu": {"dim": 384, "heads": 6, "layers": 6, "vocab": 16_000, "length": 256, "steps": 20_000, "batch": 64},
        "paper": {"dim": DIM, "heads": HEADS, "layers": LAYERS, "vocab": 32_000, "length": LENGTH, "steps": 100_000},
    },
    "dialogue": {
        "smoke": {"dim": 128, "heads": 4, "layers": 3, "vocab": 6000, "length": 128, "steps": 1500, "batch": 32},
        "gpu": {"dim": 256, "heads": 4, "layers": 4, "vocab": 12_000, "length": 256, "steps": 10_000, "batch": 128},
        "paper": {"dim": DIM, "heads": HEADS, "layers": LAYERS, "vocab": 32_000, "length": 512, "steps": 100_000},
    },
    "summaries": {
        "smoke": {"dim": 128, "heads": 4, "layers": 3, "vocab": 6000, "length": 192, "steps": 1500, "batch": 16},
        "gpu": {"dim": 384, "heads": 6, "layers": 6, "vocab": 16_000, "length": 512, "steps": 20_000, "batch": 64},
        "paper": {"dim": DIM, "heads": HEADS, "layers": LAYERS, "vocab": 32_000, "length": 512, "steps": 100_000},
    },
}
DATA: dict[str, PairDataConfig] = {
    "translation": PairDataConfig(),
    "grammar": PairDataConfig(source="grammar"),
    "docstrings": PairDataConfig(source="docstrings", metrics=("rouge",)),
    "dialogue": PairDataConfig(metrics=("bleu", "chrf", "rouge")),
    "summaries": PairDataConfig(languages=("article", "highlights"), cut_sources=True, metrics=("rouge",)),
}
OPTIM = replace(MUON, lr=0.004, muon_lr=0.01, weight_decay=0.01, warmup=100)


def build(row: Row, size: str, *, name: str) -> RunConfig:
    """Return the config of a row at a size."""
    at, paper = SHAPES[name][size], size == "paper" and name != "grammar"
    shrunk = [shrink_spec(spec, seq_len=at["length"], heads=at["heads"], rank=32) for spec in row.mixers]
    model = Seq2SeqConfig(
        dim=at["dim"],
        max_len=at["length"],
        mixers=tuple(shrunk),
        cross_mixers=({"name": "attention", "heads": at["heads"]},),
        layers=at["layers"],
        vocab=at["vocab"],
        norm="post" if paper else "pre",
        mlp="gelu",
        embed_scale=at["dim"] ** 0.5,
        dropout=0.1,
        init_std=0.02 if not paper else at["dim"] ** -0.5,
    )
    data = replace(DATA[name], max_tokens=at["length"])
    if name == "grammar":  # what it says follows from rules, and its idioms are there once
        model, data = replace(model, dropout=0.0), replace(data, smoothing=0.0)
    if paper:  # 25,000 source and 25,000 target tokens in a batch, on 8 GPUs
        data = replace(data, batch_tokens=50_000)
        adam = OptimConfig(lr=0.0007, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0, schedule="vaswani", warmup=4000)
        loop = TrainConfig(
            steps=at["steps"], batch_size=2048, precision="bf16", log_every=100, eval_every=5000, save_every=2500
        )
        return RunConfig(model, data, adam, loop)
    every = at["steps"] // 5
    loop = TrainConfig(
        steps=at["steps"], batch_size=at["batch"], eval_every=every, eval_batch=64, save_every=every, samples=8
    )
    return RunConfig(model, data, OPTIM, loop)


ABOUT = {
    "translation": "translation of any parallel text, such as Multi30k; WMT'14 as printed",
    "grammar": "English to Spanish over a small grammar of our own, in two minutes",
    "docstrings": "the docstring of a function from its body, over Python's standard library",
    "dialogue": "the next turn of a dialogue, from a file in the form of PersonaChat",
    "summaries": "summaries of articles, from tables such as those of CNN/DailyMail",
}
RECIPES = tuple(Recipe(name, about, ROWS, "attention", partial(build, name=name)) for name, about in ABOUT.items())
