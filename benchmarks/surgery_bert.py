r"""Replace the attention in the last layers of a sentence encoder, before and after a short distillation.

Similarity of sentences and accuracy on SST-2 are measured.

    python benchmarks/surgery_bert.py --model all-MiniLM-L6-v2 --train sst2/train.tsv --test sst2/dev.tsv \
        [--steps 200] [--out runs/surgery_bert] [--rows ...]

``--model``: a folder of a BERT encoder with its tokenizer; ``--train`` and ``--test``: labelled sentences of SST-2, two
columns. The last 1, 2, 3 layers become Hydra, AFT-full, External or linear attention with copied projections.
Similarity: rank correlation of the cosines of pairs of test sentences with those of the untouched encoder, and the mean
cosine of a sentence's two vectors. Accuracy: a logistic regression on the vectors of 4,000 training sentences.
Distillation: other training sentences, without labels. Written to benchmarks/results/surgery_bert.json after each row;
finished rows are not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmix.hosts import replace_mixers
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.train import distill
from tokenmix.system.torchvision import ensure_torchvision
from whole_models import RESULTS

LENGTH, BATCH, PROBE, PAIRS = 48, 32, 4000, 400
MIXERS: dict[str, dict[str, Any]] = {
    "hydra": {"name": "hydra"},
    "aft_full": {"name": "aft_full", "max_len": LENGTH, "rank": 16},
    "external": {"name": "external_multihead"},
    "linear": {"name": "linear"},
}
DEPTHS = (1, 2, 3)


def sentences(file: Path) -> tuple[list[str], Tensor]:
    """Read sentences and labels."""
    texts, labels = [], []
    for line in file.read_text().splitlines()[1:]:
        text, _, label = line.rpartition("\t")
        if label in ("0", "1"):
            texts.append(text.strip())
            labels.append(int(label))
    return texts, torch.tensor(labels)


def batches(tokenizer: Any, texts: list[str], size: int = BATCH) -> list[dict[str, Tensor]]:
    """Return padded token ids and masks, batch by batch."""
    parts = [texts[i : i + size] for i in range(0, len(texts), size)]
    return [
        dict(tokenizer(part, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")) for part in parts
    ]


@torch.no_grad()
def vectors(model: Any, data: list[dict[str, Tensor]]) -> Tensor:
    """Return the mean of the real tokens' last states, scaled to length one: what the encoder is used for."""
    found = []
    for batch in data:
        mask = batch["attention_mask"][..., None].float()
        states = model(**batch).last_hidden_state
        found.append((states * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(found), dim=-1)


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's rank correlation of two vectors."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def accuracy(train: Tensor, labels: Tensor, test: Tensor, answers: Tensor) -> float:
    """Return the accuracy of a logistic regression on the vectors."""
    from sklearn.linear_model import LogisticRegression

    probe = LogisticRegression(C=10.0, max_iter=1000).fit(train.numpy(), labels.numpy())
    return float((torch.from_numpy(probe.predict(test.numpy())) == answers).double().mean())


class Judge:
    """Score an encoder beside the untouched one."""

    def __init__(self, teacher: Any, tokenizer: Any, train: Path, test: Path):
        texts, labels = sentences(train)
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
        chosen = order[:PROBE]
        self.unlabelled = batches(tokenizer, [texts[i] for i in order[PROBE : PROBE + 8000]])
        self.probe, self.labels = batches(tokenizer, [texts[i] for i in chosen]), labels[chosen]
        texts, self.answers = sentences(test)
        self.test = batches(tokenizer, texts)
        self.pair = torch.triu_indices(PAIRS, PAIRS, 1)
        self.wanted = vectors(teacher, self.test)

    def judge(self, model: Any) -> dict[str, float]:
        """Return the three figures."""
        test = vectors(model, self.test)
        ours, theirs = ((x[self.pair[0]] * x[self.pair[1]]).sum(-1) for x in (test, self.wanted))
        return {
            "rank_correlation": rank_correlation(ours, theirs),
            "same_sentence_cosine": float((test * self.wanted).sum(-1).mean()),
            "sst2": accuracy(vectors(model, self.probe), self.labels, test, self.answers),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/surgery_bert"))
    parser.add_argument("--rows", nargs="*", default=[f"{name} {depth}" for name in MIXERS for depth in DEPTHS])
    given = parser.parse_args()
    torch.set_num_threads(1)
    ensure_torchvision()
    from transformers import AutoModel, AutoTokenizer

    path = RESULTS.joinpath("surgery_bert.json")
    found = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "steps": given.steps, "rows": {}}
    teacher, tokenizer = AutoModel.from_pretrained(given.model).eval(), AutoTokenizer.from_pretrained(given.model)
    judge = Judge(teacher, tokenizer, given.train, given.test)
    if "untouched" not in found:
        found["untouched"] = judge.judge(teacher)
    print("untouched", found["untouched"], flush=True)
    for label in given.rows:
        name, _, depth = label.partition(" ")
        if label not in found["rows"]:
            found["rows"][label] = run(
                teacher, judge, MIXERS[name], int(depth), given.out / label.replace(" ", "_"), given.steps
            )
            path.write_text(json.dumps(found, indent=1) + "\n")
        print(label, found["rows"][label], flush=True)


def run(teacher: Any, judge: Judge, spec: dict[str, Any], depth: int, out: Path, steps: int) -> dict[str, Any]:
    """Measure one encoder with replaced layers, before and after distillation."""
    student, report = replace_mixers(teacher, {"*": spec}, last=depth, seed=0)
    entry: dict[str, Any] = {"copied_share": report.share, "replaced": judge.judge(student.eval())}
    began = time.perf_counter()
    distill(
        teacher,
        student,
        judge.unlabelled,
        out=out,
        layer_steps=steps // 2,
        steps=steps - steps // 2,
        lr=1e-3,
        verbose=False,
    )
    return {**entry, "distilled": judge.judge(student.eval()), "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    main()
