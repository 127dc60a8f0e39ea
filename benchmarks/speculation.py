"""Measure what guesses cost and gain in ``LM.generate``: a chunk beside single tokens, and texts with and without.

    python -m benchmarks.speculation --cost                        # extend of 1 to 32 tokens, in steps of the decoder
    python -m benchmarks.speculation --train FOLDER --text TEXT    # three byte models, minutes each
    python -m benchmarks.speculation --write FOLDER --text TEXT    # tokens a second, acceptance, tokens of a check
    python -m benchmarks.speculation --price FOLDER --text TEXT    # what shared noise gives away to rejection sampling

Texts are compared token by token with those without guesses; where they differ, it is counted whether the two largest
logits (greedy) of that place differ by less than ``CLOSE``. All ways of a row take turns in one process.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.decoder import CLOSE, DELTA, ROTARY, SIZES, build
from torch import Tensor

from tokenmix.models import LM, LMConfig, ModelDrafter, NgramDrafter
from tokenmix.models.sampling import keep_top

MODELS = {
    "gated_delta, attention 3:1": ((DELTA, DELTA, DELTA, ROTARY), 128),
    "aft_forget": (({"name": "aft_forget"},) * 4, 128),
    "small": (({"name": "aft_forget"},) * 2, 64),
}
"""The layers and widths of the models that are trained; the last one guesses for the others."""
ROWS = ("aft_simple", "linear", "aft_forget", "gated_delta", "gated_delta, attention 3:1")
CHUNKS = (1, 2, 4, 8, 16, 32)
WINDOW, PROMPT = 128, 256
TEMPERATURE, REPEATS = 0.8, 2


@torch.no_grad()
def measure_cost(row: str, size: str, seconds: float) -> str:
    """Return a line of a table: the time of chunks as multiples of the decoder's for one token."""
    layers, dim = SIZES[size]
    model = build(row, layers, dim, 2048)
    decoder, tokens = model.decoder(), torch.randint(256, (1, 128))
    _, state = model.extend(tokens, model.init_state(1))
    held = [state]

    def step() -> None:
        held[0] = decoder.extend(tokens[:, :1], held[0])[1]

    ways: dict[Any, Any] = {k: lambda k=k: model.extend(tokens[:, :k], state) for k in CHUNKS} | {"decoder": step}
    times: dict[Any, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["decoder"]) < 5:
        for way, call in ways.items():
            start = time.perf_counter()
            call()
            times[way].append(time.perf_counter() - start)
    one = min(times["decoder"])
    cells = [row, size, f"{1e3 * one:.2f}", *(f"{min(times[k]) / one:.1f}" for k in CHUNKS)]
    return "| " + " | ".join(cells) + " |"


def read_bytes(path: Path) -> tuple[Tensor, Tensor]:
    """Return nine tenths of a text to learn from and the rest."""
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    return data[: -len(data) // 10], data[-len(data) // 10 :]


def train_model(name: str, data: Tensor, steps: int, seed: int) -> LM:
    """Train a byte model."""
    torch.manual_seed(seed)
    mixers, dim = MODELS[name]
    config = LMConfig(dim=dim, max_len=8 * WINDOW, mixers=mixers, norm_type="rms", mlp="swiglu", positions=None)
    model = LM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    losses = []
    for step in range(steps):
        at = torch.randint(len(data) - WINDOW - 1, (8,))
        x = torch.stack([data[i : i + WINDOW + 1] for i in at])
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 50, 2 * (1 - step / steps))
        optimizer.step()
        losses.append(float(loss.detach()))
    print(f"{name}: {sum(losses[-20:]) / len(losses[-20:]) / 0.6931:.2f} bits per byte", flush=True)
    return model.eval()


@torch.no_grad()
def write_texts(name: str, folder: Path, prompts: dict[str, Tensor], n: int, seed: int) -> None:
    """Print tokens a second of each way to write; all texts must be the same."""
    model, small = (LM.from_pretrained(folder / each.replace(":", "-")) for each in (name, "small"))
    for kind, prompt in prompts.items():
        for how, sampling in (("greedy", {"temperature": 0}), ("sampled", {"temperature": TEMPERATURE, "seed": seed})):
            drafts: dict[str, Any] = {
                "extend": None,
                "decoder": None,
                "ngram": NgramDrafter(),
                "short ngram": NgramDrafter(8, longest=6, shortest=3),
                "model": ModelDrafter(small),
            }
            times: dict[str, list[float]] = {way: [] for way in drafts}
            texts: dict[str, Tensor] = {}
            for _ in range(REPEATS):
                for way, draft in drafts.items():
                    start = time.perf_counter()
                    options = {"decoder": None} if way == "extend" else {"draft": draft}
                    texts[way] = model.generate(prompt, n, **options, **sampling)
                    times[way].append(time.perf_counter() - start)
            for way, draft in drafts.items():
                per_second = f"{len(prompt) * n / min(times[way]):.0f}"
                other = count_others(model, texts["extend"], texts[way], prompt.shape[1])
                cells = [name, kind, how, str(len(prompt)), way, per_second]
                if draft is not None:
                    cells += [f"{draft.counts.acceptance:.2f}", f"{draft.counts.tokens_per_check:.1f}"]
                    cells += [f"{draft.counts.checks / (len(prompt) * n):.3f}"]
                else:
                    cells += ["", "", ""]
                print("| " + " | ".join([*cells, other]) + " |", flush=True)


@torch.no_grad()
def count_others(model: LM, expected: Tensor, found: Tensor, begin: int) -> str:
    """Count rows that were written otherwise, and those whose first other token was almost as good."""
    rows = close = 0
    for a, b in zip(expected, found, strict=True):
        if torch.equal(a, b):
            continue
        at = int((a != b).nonzero()[0])
        first, second = model(a[None, :at])[0, -1].topk(2).values.tolist()
        rows, close = rows + 1, close + (first - second < CLOSE)
    return f"{rows} ({close} close)" if rows else "0"


@torch.no_grad()
def compare_rules(name: str, folder: Path, data: Tensor) -> None:
    """Print the mean chance that a guess is taken, with shared noise and with rejection sampling."""
    model, small = (LM.from_pretrained(folder / each.replace(":", "-")) for each in (name, "small"))
    x = data[: 16 * WINDOW].view(16, WINDOW)
    for temperature, top_k in ((1.0, None), (0.8, None), (0.8, 20)):
        logits = (m(x).flatten(0, 1) / temperature for m in (model, small))
        p, q = (keep_top(each, top_k, None).softmax(-1).double() for each in logits)
        rejection = p.minimum(q).sum(-1)
        shared = torch.zeros(len(p), dtype=torch.float64)
        for token in range(p.shape[1]):  # 1 / the sum over others of the larger ratio, the race of two exponentials
            a, b = p[:, token : token + 1], q[:, token : token + 1]
            ratio = (p / a.clamp_min(1e-300)).maximum(q / b.clamp_min(1e-300)).sum(-1)
            shared += torch.where((a * b)[:, 0] > 0, 1 / ratio, 0.0)
        best = p.gather(1, q.argmax(1, keepdim=True))[:, 0]
        row = [name, temperature, top_k, *(f"{float(each.mean()):.3f}" for each in (shared, rejection, best))]
        print("| " + " | ".join(map(str, row)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--train", type=Path, metavar="FOLDER")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    parser.add_argument("--price", type=Path, metavar="FOLDER")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=400, help="of training, for each model")
    parser.add_argument("--seconds", type=float, default=4.0, help="of costs, for each model")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seed", type=int, default=0, help="of training and of sampled texts")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.cost:
        print("| model | size | decoder, ms | " + " | ".join(map(str, CHUNKS)) + " |\n" + "|---" * 9 + "|")
        for size in SIZES:
            for row in ROWS:
                print(measure_cost(row, size, given.seconds), flush=True)
    if given.text is None:
        return
    learned, held = read_bytes(given.text)
    if given.train:
        for name in MODELS:
            train_model(name, learned, given.steps, given.seed).save_pretrained(given.train / name.replace(":", "-"))
    names = [name for name in MODELS if name != "small"]
    if given.write:
        head = (
            "model",
            "prompt",
            "text",
            "rows",
            "way",
            "tokens/s",
            "acceptance",
            "tokens per check",
            "checks per token",
        )
        print("| " + " | ".join([*head, "written otherwise"]) + " |\n" + "|---" * (len(head) + 1) + "|")
        for rows in given.rows:
            prompts = {"ordinary": held[: rows * PROMPT].view(rows, PROMPT)}
            prompts["repeated"] = held[: rows * PROMPT // 4].view(rows, PROMPT // 4).repeat(1, 4)
            for name in names:
                write_texts(name, given.write, prompts, given.tokens, given.seed)
    if given.price:
        print("| model | temperature | top-k | shared noise | rejection | most likely guess |\n" + "|---" * 6 + "|")
        for name in names:
            compare_rules(name, given.price, held)


if __name__ == "__main__":
    main()
