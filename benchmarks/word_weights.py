"""Read how strongly words attend words in the encoders of trained models of the grammar, one value for each seed.

    for seed in 0 1 2; do tokenmix train grammar --train.seed $seed --train.steps 300 --out runs/grammar-$seed; done
    python -m benchmarks.word_weights runs/grammar-* --record     # results/word_weights.json

The sentence is that of the first introductory article on attention: "The black cat drank the milk". A row is the weight
of one word in another's output, the mean over layers and heads of the encoder. The claims in
``src/tokenmix/lab/papers/sources/explained.toml`` compare rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.explain.runs import explain_runs

RECORD = Path(__file__).parent / "results" / "word_weights.json"
SENTENCE, WORD, OTHERS = "The black cat drank the milk", "milk", ("drank", "cat", "black")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs, one for each seed")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    given = parser.parse_args()
    rows: dict[str, dict[str, list[float]]] = {f"{WORD} reads {other}": {"weight": []} for other in OTHERS}
    losses = []
    for told in explain_runs(given.runs, SENTENCE):
        words = [piece.strip().lower() for piece in told.source.pieces]
        weights = torch.stack([site.weights.mean(0) for site in told.sites if site.part == "encoder"]).mean(0)
        for other in OTHERS:
            rows[f"{WORD} reads {other}"]["weight"].append(
                round(float(weights[words.index(WORD), words.index(other)]), 5)
            )
        losses.append(round(told.loss, 4))
        print(told.name, repr(told.written), {name: row["weight"][-1] for name, row in rows.items()})
    if given.record:
        found = {"machine": machine(), "sentence": SENTENCE, "loss": losses, "metric": "weight", "rows": rows}
        RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
