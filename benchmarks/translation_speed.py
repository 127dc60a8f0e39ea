"""Time training and writing of the recipe ``translation``, row by row, at several lengths.

    python -m benchmarks.translation_speed              # print the table
    python -m benchmarks.translation_speed --record     # and keep it in results/translation_speed.json

The models are those of the recipe's smallest size, 3 + 3 layers of 128 features, built for sources and targets of T
tokens. Training is forward, backward and the update over 2,048 tokens of target and as many of source. Writing is one
token after another, T of them, from T tokens of source, for 4 sources at once. All rows of a length take turns in one
process of one thread; numbers are minima.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.recipes.recipe import shrink_spec
from tokenmix.lab.train.optim import build_optimizers, update
from tokenmix.models import build_model

RECORD = Path(__file__).parent / "results" / "translation_speed.json"
LENGTHS, TOKENS, SOURCES, TURNS = (64, 256, 1024), 2048, 4, 3


class Row:
    """One row of the recipe at a length, with its optimiser.

    Args:
        name: name of the row.
        length: tokens of source and of target, T.
    """

    def __init__(self, name: str, length: int):
        recipe = RECIPES["translation"]
        config = recipe.config(name, "smoke")
        spec = shrink_spec(recipe.rows[name].mixers[0], seq_len=length, heads=4, rank=32)
        torch.manual_seed(0)
        self.length, self.optim = length, config.optim
        self.model: Any = build_model(replace(config.model, max_len=length, mixers=(spec,)))
        self.optimizers = build_optimizers(self.model, self.optim)
        shape = max(1, TOKENS // length), length + 1
        self.source, self.target = (torch.randint(10, config.model.vocab, shape) for _ in range(2))

    def train(self) -> None:
        """Make one training step."""
        self.model.train()
        logits = self.model(self.source[:, :-1], self.target[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.target[:, 1:].flatten()).backward()
        update(self.model, self.optimizers, self.optim, 0, None)

    @torch.no_grad()
    def write(self) -> None:
        """Write T tokens for each source; which ones does not matter to the time."""
        self.model.eval()
        state = self.model.init_state(self.source[:1, :-1].expand(SOURCES, -1))
        token = torch.full((SOURCES, 1), 10)
        for _ in range(self.length):
            logits, state = self.model.extend(token, state)
            token = logits[:, -1].argmax(-1, keepdim=True)


def timed(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def measured(length: int) -> list[dict[str, Any]]:
    """Return tokens per second of training and milliseconds per written token of every row, at one length."""
    rows = {name: Row(name, length) for name in RECIPES["translation"].rows}
    train: dict[str, list[float]] = {name: [] for name in rows}
    write: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(TURNS + 1):  # the first warms up
        for name, row in rows.items():
            train[name].append(timed(row.train))
            if turn:
                write[name].append(timed(row.write))
    return [
        {
            "row": name,
            "length": length,
            "tokens_per_s": round(rows[name].target[:, 1:].numel() / min(train[name][1:])),
            "ms_per_token": round(1000 * min(write[name]) / length, 3),
        }
        for name in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = [row for length in given.lengths for row in measured(length)]
    names = list(dict.fromkeys(row["row"] for row in found))
    at = {(row["row"], row["length"]): row for row in found}
    columns = [f"training, {n:,}" for n in given.lengths] + [f"writing, {n:,}" for n in given.lengths]
    print("| row | " + " | ".join(columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    for name in names:
        cells = [f"{at[name, n]['tokens_per_s']:,}" for n in given.lengths]
        cells += [f"{at[name, n]['ms_per_token']:.2f}" for n in given.lengths]
        print(f"| `{name}` | " + " | ".join(cells) + " |")
    if given.record:
        RECORD.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
