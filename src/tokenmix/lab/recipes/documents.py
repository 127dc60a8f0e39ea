"""Documents and labelled texts in subwords: language models, masked models, replaced spans, and classes of texts.

``subwords`` trains a language model, ``masked`` an encoder to fill in masked words (Devlin et al. 2019, arXiv
1810.04805), ``spans`` an encoder-decoder to write the spans that sentinels replace (Raffel et al. 2020, arXiv
1910.10683), and ``sentences`` an encoder to tell the class of a text or of a pair of texts. All take texts from a
folder, a table or a file (``--data``); without them the first three read the sources of Python's standard library, and
``sentences`` tells whether a docstring belongs to a function.

``masked`` and ``sentences`` have the same model, so that a classifier can start from a masked model of its row:
``tokenmix train sentences --data SST-2 --train.init RUN``. ``paper`` is the size of T5-base, in which the Synthesizer
paper (Tay et al. 2020, arXiv 2005.00743) trains its models of language: 12 layers of 768 features, 524,288 steps of 128
texts of up to 512 tokens; of a masked encoder that paper has no row.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...models import EncoderConfig, LMConfig, ModelConfig, Seq2SeqConfig
from ...types import Options, Spec
from ..train import DocumentDataConfig, LabelDataConfig
from ..train.config import RunConfig, TrainConfig
from ..train.registry import TaskData
from .recipe import MUON, Recipe, Row, shrink_spec
from .translation import ROWS

SIZES: dict[str, Options] = {
    "smoke": {"dim": 128, "heads": 4, "layers": 4, "vocab": 6000, "length": 128, "steps": 1500, "batch": 32},
    "gpu": {"dim": 384, "heads": 6, "layers": 6, "vocab": 16_000, "length": 256, "steps": 20_000, "batch": 128},
    "paper": {"dim": 768, "heads": 12, "layers": 12, "vocab": 32_000, "length": 512, "steps": 524_288, "batch": 128},
}
RATES = {"sentences": 0.002}
"""Rates of recipes that do not take the one of translation."""
STEPS = {"sentences": {"smoke": 1000, "gpu": 5000, "paper": 20_000}}


def build(row: Row, size: str, *, name: str) -> RunConfig:
    """Return the config of a row at a size."""
    at = SIZES[size] | {"steps": STEPS.get(name, {}).get(size, SIZES[size]["steps"])}
    shared: Options = {
        "dim": at["dim"],
        "max_len": at["length"],
        "mixers": tuple(_resize_spec(spec, at) for spec in row.mixers),
        "layers": at["layers"],
        "vocab": at["vocab"],
        "mlp": "gelu",
        "dropout": 0.1 if name in ("sentences", "spans") else 0.0,
    }
    if name == "spans":
        cross = ({"name": "attention", "heads": at["heads"]},)
        shared |= {"layers": max(at["layers"] // 2, 1)} if size == "smoke" else {}
        model: ModelConfig = Seq2SeqConfig(**shared, cross_mixers=cross, embed_scale=at["dim"] ** 0.5)
    elif name == "subwords":
        model = LMConfig(**shared)
    else:
        model = EncoderConfig(**shared, classes=2 if name == "sentences" else 0)
    if name == "sentences":
        data: TaskData = LabelDataConfig(max_tokens=at["length"])
    else:
        data = DocumentDataConfig(max_tokens=at["length"], packed=name != "spans")
    every = max(at["steps"] // 5, 1)
    loop = TrainConfig(
        steps=at["steps"],
        batch_size=at["batch"],
        eval_every=every,
        eval_batch=64,
        eval_texts=2000,
        save_every=every,
        precision="bf16" if size == "paper" else "fp32",
        samples=4 if name == "subwords" else 0,
    )
    rate = RATES.get(name, 0.004)
    return RunConfig(model, data, replace(MUON, lr=rate, muon_lr=2.5 * rate, warmup=100), loop)


def _resize_spec(spec: Spec, at: Options) -> Spec:
    """Return a spec of translation's rows, which have 8 heads, in a model of another size."""
    heads = {"heads": at["heads"]} if "heads" in spec else {}
    return shrink_spec({**spec, **heads}, seq_len=at["length"], heads=at["heads"], rank=32)


ABOUT = {
    "subwords": "language model over documents in subwords, of which none sees another",
    "masked": "encoder that fills in masked words of documents; `sentences` can start from it",
    "spans": "encoder-decoder that writes the spans of documents that sentinels replace, as T5",
    "sentences": "classes of texts or of pairs of texts, such as SST-2 or IMDB",
}
RECIPES = tuple(Recipe(name, about, ROWS, "attention", partial(build, name=name)) for name, about in ABOUT.items())
