r"""From a folder to a faster service: replace attention in a sentence encoder, teach it, and say what that gained.

    python benchmarks/sentence_service.py teach MODEL OUT --texts captions.txt reviews.jsonl.xz [--last 4]
    python benchmarks/sentence_service.py time MODEL OUT [--lengths 128 512] [--threads 2]
    python benchmarks/sentence_service.py draw OUT

MODEL is a folder of sentence-transformers with a BERT-like encoder, such as all-MiniLM-L6-v2. ``teach`` replaces the
attention of its last layers, distils the encoder on the texts, and writes ``OUT/model``, a folder that
sentence-transformers opens, and ``OUT/quality.json``: Spearman's rank correlation between the cosines of 1,000 held-out
pairs of each file and those of MODEL, before and after. ``time`` writes ``OUT/times.json``: the time of a pass of both
encoders in torch and in ONNX Runtime, in turns. ``draw`` draws both as ``OUT/service.png``.

A file of texts is plain text or JSON lines with a field "text", compressed (.gz, .xz) or not. The last tenth of its
lines is held out. Texts longer than ``LONG`` characters are also scored cut into sentences.
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tokenmix.hosts.torchvision  # noqa: F401  before transformers: a torchvision of another torch would break it
from surgery_bert import rank_correlation, vectors
from tokenmix.errors import MixerError
from tokenmix.export import export_onnx
from tokenmix.hosts import load_converted, replace_mixers, save_replaced
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.train import distill
from tokenmix.system.files import write_json

PAIRS, DRAWN, LONG, ROUNDS = 1000, 250, 400, 12
SHAPES = ((32, 48), (8, 192), (3, 512))
"""Texts of a batch and tokens of a text, in turns: most services read sentences, some read pages."""


class Corpus(NamedTuple):
    """Hold the texts of one file: those to learn from, and those to score."""

    name: str
    learn: list[str]
    score: list[str]


def read_texts(path: Path) -> list[str]:
    """Return the texts of a file, one a line.

    Raises:
        MixerError: if there are fewer than 40, too few to hold some out and pair them.
    """
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    with openers.get(path.suffix, open)(path, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] if ".json" in path.name else line.strip() for line in lines if line.strip()]
    if len(texts) < 40:
        raise MixerError(f"{path}: holds {len(texts)} texts; 40 are the least that can be split and paired.")
    return texts


def split_sentences(texts: list[str]) -> list[str]:
    """Return the sentences of 20 to 300 characters of some texts."""
    parts = (part.strip() for text in texts for part in re.split(r"(?<=[.!?])\s+", text))
    return [part for part in parts if 20 <= len(part) <= 300]


def load_corpora(paths: list[Path]) -> list[Corpus]:
    """Read files; long texts give two corpora, one of whole texts and one of their sentences."""
    corpora = []
    for path in paths:
        texts, name = read_texts(path), path.name.partition(".")[0]
        cut = len(texts) - max(len(texts) // 10, 20)
        corpora.append(Corpus(name, texts[:cut], texts[cut:]))
        if statistics.median(len(text) for text in texts) > LONG:
            corpora.append(Corpus(f"{name}, sentences", split_sentences(texts[:cut]), split_sentences(texts[cut:])))
    return corpora


def batches(tokenizer: Any, corpora: list[Corpus], seed: int) -> Callable[[int], dict[str, Tensor]]:
    """Return a function from the step to its batch, so that a stopped distillation goes on with the same numbers."""

    def batch(step: int) -> dict[str, Tensor]:
        size, tokens = SHAPES[step % len(SHAPES)]
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        texts = []
        for _ in range(size):
            corpus = corpora[int(torch.randint(len(corpora), (), generator=draw))]
            texts.append(corpus.learn[int(torch.randint(len(corpus.learn), (), generator=draw))])
        return encode(tokenizer, texts, tokens)

    return batch


def encode(tokenizer: Any, texts: list[str], tokens: int) -> dict[str, Tensor]:
    """Return padded token numbers and masks."""
    return dict(tokenizer(texts, padding=True, truncation=True, max_length=tokens, return_tensors="pt"))


def cosines(model: Any, tokenizer: Any, corpus: Corpus) -> Tensor:
    """Return the cosines of ``PAIRS`` pairs of held-out texts, drawn once and for all."""
    draw = torch.Generator().manual_seed(0)
    texts = [corpus.score[i] for i in torch.randperm(len(corpus.score), generator=draw)[:DRAWN].tolist()]
    pairs = torch.triu_indices(len(texts), len(texts), 1)
    first, second = pairs[:, torch.randperm(pairs.shape[1], generator=draw)[:PAIRS]]
    found = vectors(model, [encode(tokenizer, texts[start : start + 16], 512) for start in range(0, len(texts), 16)])
    return (found[first] * found[second]).sum(-1)


def teach(given: argparse.Namespace) -> None:
    """Replace, distil, save, score."""
    from transformers import AutoModel, AutoTokenizer

    torch.manual_seed(given.seed)
    teacher, tokenizer = AutoModel.from_pretrained(given.model).eval(), AutoTokenizer.from_pretrained(given.model)
    corpora = load_corpora(given.texts)
    wanted = {corpus.name: cosines(teacher, tokenizer, corpus) for corpus in corpora}
    student, report = replace_mixers(teacher, {"*": json.loads(given.mixer)}, last=given.last, seed=given.seed)
    print(report)

    def score(model: Any) -> dict[str, list[float]]:
        return {corpus.name: cosines(model, tokenizer, corpus).tolist() for corpus in corpora}

    before = score(student.eval())
    began = time.process_time()
    distill(
        teacher,
        student,
        batches(tokenizer, corpora, given.seed),
        out=given.out / "run",
        layer_steps=given.layer_steps,
        steps=given.steps,
        train="all",
        lr=given.rate,
        seed=given.seed,
        resume=(given.out / "run").exists(),
    )
    spent = time.process_time() - began
    after = score(student.eval())
    save_replaced(student, given.out / "model", report, beside=given.model)
    correlation = {
        name: {when: rank_correlation(torch.tensor(scores[name]), wanted[name])
               for when, scores in (("before", before), ("after", after))}
        for name in wanted
    }  # fmt: skip
    original = {name: values.tolist() for name, values in wanted.items()}
    found = {"mixer": json.loads(given.mixer), "last": given.last, "steps": [given.layer_steps, given.steps],
             "seed": given.seed, "cpu_seconds": spent, "rank_correlation": correlation,
             "cosines": {"original": original, "before": before, "after": after}}  # fmt: skip
    write_json(given.out / "quality.json", found)
    for name, row in correlation.items():
        print(f"{name}: rank correlation {row['before']:.3f} after replacement, {row['after']:.3f} after distillation")


def measure(given: argparse.Namespace) -> None:
    """Time both encoders, in torch and in ONNX Runtime, in turns, and compare what they answer."""
    import onnxruntime
    from transformers import AutoModel

    torch.set_num_threads(given.threads)
    models = {"original": AutoModel.from_pretrained(given.model).eval(), "new": load_converted(given.out / "model")}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = given.threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # else one session slows the next
    sessions = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models.items():
            file = Path(folder) / f"{name}.onnx"
            export_onnx(model.eval(), file, key_mask=True, length=max(given.lengths))
            sessions[name] = onnxruntime.InferenceSession(str(file), options)
    rows, words = [], models["original"].config.vocab_size
    for length in given.lengths:
        ids = torch.randint(5, words, (given.batch, length), generator=torch.Generator().manual_seed(0))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        arrays = {name: value.numpy() for name, value in batch.items()}
        calls = {
            "torch": {name: partial(model, **batch) for name, model in models.items()},
            "ONNX Runtime": {name: partial(session.run, None, arrays) for name, session in sessions.items()},
        }
        for runtime, pair in calls.items():
            row = {"runtime": runtime, "tokens": length, "batch": given.batch}
            rows.append(row | compare_turns({name: partial(stopwatch, call) for name, call in pair.items()}))
            print("{runtime}, {tokens} tokens: {original:.4f} s, {new:.4f} s, {ratio:.2f} times".format(**rows[-1]))
    write_json(given.out / "times.json", {"threads": given.threads, "machine": machine(), "rows": rows})


def stopwatch(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@torch.no_grad()
def compare_turns(pair: dict[str, Callable[[], float]], rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median seconds of two measurements in turns, and the quartiles of the ratio within a turn."""
    seconds: dict[str, list[float]] = {name: [] for name in pair}
    for turn in range(rounds + 1):
        for name, measure_once in pair.items():
            found = measure_once()
            if turn:  # the first warms up
                seconds[name].append(found)
    ratios = [a / b for a, b in zip(seconds["original"], seconds["new"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return medians | {"ratio": middle, "low": low, "high": high}


def draw(given: argparse.Namespace) -> None:
    """Draw the cosines of pairs, new against original, and the ratios of times."""
    from matplotlib.figure import Figure

    quality, times = (json.loads((given.out / f"{name}.json").read_text()) for name in ("quality", "times"))
    names = list(quality["rank_correlation"])
    figure = Figure(figsize=(4 * (len(names) + 1), 4), layout="constrained")
    axes = figure.subplots(1, len(names) + 1)
    for ax, name in zip(axes, names, strict=False):
        row = quality["rank_correlation"][name]
        for when, colour in (("before", "#bbbbbb"), ("after", "#2060a0")):
            label = f"{'replaced' if when == 'before' else 'distilled'}: {row[when]:.3f}"
            ax.scatter(quality["cosines"]["original"][name], quality["cosines"][when][name], 3, colour, label=label)
        ax.set(title=name, xlabel="cosine of a pair, original", ylabel="with new layers", aspect="equal")
        ax.legend(title="rank correlation", markerscale=3, loc="upper left")
    rows = times["rows"]
    labels = [f"{row['runtime']}, {row['tokens']}" for row in rows]
    spread = [[row["ratio"] - row["low"] for row in rows], [row["high"] - row["ratio"] for row in rows]]
    axes[-1].barh(labels, [row["ratio"] for row in rows], xerr=spread, color="#2060a0")
    axes[-1].axvline(1, color="black", linewidth=0.8)
    axes[-1].set(title="times as fast as the original", xlabel="median and quartiles")
    axes[-1].invert_yaxis()
    figure.savefig(given.out / "service.png", dpi=100)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("teach")
    verb.add_argument("model", type=Path)
    verb.add_argument("out", type=Path)
    verb.add_argument("--texts", type=Path, nargs="+", required=True)
    verb.add_argument("--mixer", default='{"name": "linear"}')
    verb.add_argument("--last", type=int, default=4)
    verb.add_argument("--layer-steps", type=int, default=200)
    verb.add_argument("--steps", type=int, default=800)
    verb.add_argument("--rate", type=float, default=3e-4)
    verb.add_argument("--seed", type=int, default=0)
    verb.set_defaults(run=teach)
    verb = verbs.add_parser("time")
    verb.add_argument("model", type=Path)
    verb.add_argument("out", type=Path)
    verb.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    verb.add_argument("--batch", type=int, default=4)
    verb.add_argument("--threads", type=int, default=torch.get_num_threads())
    verb.set_defaults(run=measure)
    verb = verbs.add_parser("draw")
    verb.add_argument("out", type=Path)
    verb.set_defaults(run=draw)
    given = parser.parse_args()
    try:
        given.run(given)
    except (MixerError, OSError) as why:
        print(f"error: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
