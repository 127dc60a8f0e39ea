"""Compare the planned decoder with ``extend``, token by token, and time both beside ONNX Runtime.

    python -m benchmarks.decoder --text                # greedy text of 5,000 tokens, every streaming core mixer
    python -m benchmarks.decoder --speed               # a token of whole models, in turns with ONNX Runtime
    python -m benchmarks.decoder --text --record       # and keep it in results/decoder.json

The text is the greedy text of ``extend``; at each token it is counted whether the decoder would have written another
one, and whether the two largest logits differ there by less than ``CLOSE``. Times are of models whose exported decode
step (``export_onnx(decode=True)``) runs in ONNX Runtime in the same process, after their logits were found equal. The
limit is reading as many bytes as the weights of products have, at the rate of a sum over a larger tensor.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from timeit import repeat
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tokenmix.export import OnnxModel, export_onnx
from tokenmix.lab.bench.roofline import machine
from tokenmix.models import LM, LMConfig
from tokenmix.models.decoder import Weights
from tokenmix.testing.tolerances import ADVERSARIAL

RECORD = Path(__file__).parent / "results" / "decoder.json"
TOKENS, CLOSE, VOCAB = 5000, 1e-4, 256
ROTARY = {"name": "attention", "heads": 4, "positions": {"name": "rotary"}}
DELTA = {"name": "gated_delta", "heads": 4}
TEXTS: dict[str, tuple[dict[str, Any], ...]] = {
    "attention": (ROTARY,),
    "aft_full": ({"name": "aft_full"},),
    "aft_simple": ({"name": "aft_simple"},),
    "aft_local": ({"name": "aft_local", "window": 32},),
    "aft_conv": ({"name": "aft_conv", "heads": 4, "kernel_size": 11},),
    "aft_forget": ({"name": "aft_forget"},),
    "aft_pairs": ({"name": "aft_pairs", "heads": 4},),
    "hydra": ({"name": "hydra"},),
    "linear": ({"name": "linear", "heads": 4},),
    "external": ({"name": "external"},),
    "external_multihead": ({"name": "external_multihead", "heads": 4},),
    "synthesizer_dense": ({"name": "synthesizer_dense"},),
    "synthesizer_random": ({"name": "synthesizer_random"},),
    "synthesizer_factorized_dense": ({"name": "synthesizer_factorized_dense"},),
    "synthesizer_factorized_random": ({"name": "synthesizer_factorized_random"},),
    "gated_delta": (DELTA,),
    "kda": (DELTA | {"decay": "feature", "gate": "sigmoid"},),
    "gated_delta, attention 3:1": (DELTA, DELTA, DELTA, ROTARY),
    "aft_forget, attention 2:1": ({"name": "aft_forget"}, {"name": "aft_forget"}, ROTARY),
}
"""The layers of a model of each row: streaming mixers of the core, and hybrids."""
SIZES = {"4 x 128": (4, 128), "24 x 512": (24, 512)}
TIMED = ("aft_simple", "aft_local", "hydra", "linear", "aft_forget", "gated_delta", "gated_delta, attention 3:1")
CACHED = 2**26
"""Bytes of weights below which they may lie in a cache, so that reading memory is no limit."""
CONTEXTS, LARGE_CONTEXTS = (64, 1024), (64,)
Step = Callable[[Tensor, Any], tuple[Tensor, Any]]


def build(row: str, layers: int, dim: int, max_len: int) -> LM:
    """Build a model of bytes with modern blocks."""
    torch.manual_seed(0)
    shape = {"dim": dim, "layers": layers, "vocab": VOCAB, "max_len": max_len, "init_std": 0.08}
    modern = {"norm_type": "rms", "mlp": "swiglu", "mlp_bias": False, "positions": None}
    return LM(LMConfig(mixers=TEXTS[row], **shape, **modern)).eval()


@torch.no_grad()
def compare_text(row: str, tokens: int, weights: Weights | None = None) -> dict[str, Any]:
    """Write greedy text with ``extend``, and count where the decoder would have written another token."""
    model = build(row, max(2, len(TEXTS[row])), 64, tokens + 1)
    decoder = model.decoder(weights=weights)
    token, state, other = torch.zeros(1, 1, dtype=torch.long), model.init_state(1), decoder.state
    found = {"row": row, "tokens": tokens, "weights": weights or "float32", "others": 0, "others_close": 0}
    apart, drift, kinds = 0.0, [], set()
    for _ in range(tokens):
        y, state = model.extend(token, state)
        z, other = decoder.extend(token, other)
        first, second = y.flatten().topk(2).values.tolist()
        if int(z.argmax()) != int(y.argmax()):
            found["others"] += 1
            found["others_close"] += first - second < CLOSE
        apart = max(apart, float((y - z).abs().max()))
        drift.append(float((y - z).norm() / y.norm()))
        token = y.argmax(-1)
        kinds.add(int(token))
    found |= {"different_tokens": len(kinds), "largest_difference": apart, "relative_drift": max(drift)}
    return found | {"drift_of_the_last_tenth": median(drift[-tokens // 10 :]), "in_python": decoder.in_python}


def read_rate(weights: int) -> float:
    """Return bytes per second of a sum over a tensor of at least 256 MiB, or as large as the weights."""
    a = torch.ones(max(weights, 2**28) // 4)
    return a.nbytes / min(repeat(a.sum, number=1))


@torch.no_grad()
def compare_speed(row: str, size: str, contexts: Sequence[int], seconds: float, threads: int) -> list[dict[str, Any]]:
    """Time a token of ``extend``, of decoders and of the exported step in ONNX Runtime, in turns."""
    layers, dim = SIZES[size]
    model, draw = build(row, layers, dim, 2 * max(contexts)), torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (1, max(contexts)), generator=draw)
    with tempfile.TemporaryDirectory() as folder:
        export_onnx(model, Path(folder) / "step.onnx", decode=True)
        file = OnnxModel(Path(folder) / "step.onnx", threads=threads)
    ways: dict[str, Any] = {"decoder": model.decoder(), "onnxruntime": file, "extend": model}
    ways |= {f"decoder, {weights}": model.decoder(weights=weights) for weights in ("bfloat16", "int8")}
    states = {name: way.init_state(1) if name in ("extend", "onnxruntime") else way.state for name, way in ways.items()}
    products = sum(p.nbytes for name, p in model.named_parameters() if p.ndim == 2 and name != "embed.weight")
    rows, read = [], 0
    for context in contexts:
        for token in ids[:, read:context].split(1, dim=1):
            found = {}
            for name, way in ways.items():
                found[name], states[name] = way.extend(token, states[name])
        read = context
        worst = max(float((found[name] - found["extend"]).abs().max()) for name in ("decoder", "onnxruntime"))
        if worst > ADVERSARIAL * float(found["extend"].abs().max()):
            raise SystemExit(f"{row}, {size}: logits differ by {worst:.1e}, so no time is taken.")
        kept = pytree.tree_map_only(Tensor, torch.clone, states)  # a decoder overwrites its own
        times = take_turns({n: (way.extend, states[n]) for n, way in ways.items()}, ids[:, :1], seconds)
        rate, states = read_rate(products), kept
        least = {name: min(each) for name, each in times.items()}
        rows.append(
            {
                "row": row,
                "size": size,
                "context": context,
                "parameters": sum(p.numel() for p in model.parameters()),
                "us": {name: round(1e6 * each, 1) for name, each in least.items()},
                "median_us": {name: round(1e6 * median(each), 1) for name, each in times.items()},
                "times_onnxruntime": round(least["onnxruntime"] / least["decoder"], 2),
                "share_of_reading": round(products / rate / least["decoder"], 3) if products >= CACHED else None,
                "read_gb_per_s": round(rate / 1e9, 1),
                "in_python": ways["decoder"].in_python,
            }
        )
    return rows


def take_turns(ways: dict[str, tuple[Step, Any]], token: Tensor, seconds: float) -> dict[str, list[float]]:
    """Return the seconds of single tokens after the same state; decoders go on from their own, which costs no copy."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    states = {name: state for name, (_, state) in ways.items()}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, (extend, _) in ways.items():
            for _ in range(4):
                start = time.perf_counter()
                states[name] = extend(token, states[name])[1]
                times[name].append(time.perf_counter() - start)
        if min(len(each) for each in times.values()) >= 200:  # the context would grow
            break
    return times


def keep(part: str, rows: list[dict[str, Any]], threads: int) -> None:
    """Write rows into the record, beside what it holds of others."""
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kept[part] = {"machine": machine(), "threads": threads, "rows": rows}
    RECORD.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", action="store_true")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--rows", nargs="+", choices=TEXTS)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each model and context")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.text:
        rows = []
        print("| model | tokens | written otherwise | of these close | different tokens | drift | drift in int8 |")
        print("|---|---|---|---|---|---|---|")
        for row in given.rows or TEXTS:
            found = compare_text(row, given.tokens)
            rows += [found, narrow := compare_text(row, given.tokens, "int8")]
            cells = [row, found["tokens"], found["others"], found["others_close"], found["different_tokens"]]
            cells += [f"{each['relative_drift']:.1e}" for each in (found, narrow)]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
        if given.record:
            keep("text", rows, given.threads)
    if given.speed:
        rows = []
        print("| model | size | context | ways, us of a token | times ONNX Runtime | share of reading the weights |")
        print("|---|---|---|---|---|---|")
        for size in given.sizes:
            contexts = CONTEXTS if SIZES[size][1] == 128 else LARGE_CONTEXTS
            for row in given.rows or TIMED:
                for found in compare_speed(row, size, contexts, given.seconds, given.threads):
                    rows.append(found)
                    us = ", ".join(f"{name} {each}" for name, each in found["us"].items())
                    cells = [row, size, found["context"], us, found["times_onnxruntime"], found["share_of_reading"]]
                    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
                if given.record:
                    keep("speed", rows, given.threads)


if __name__ == "__main__":
    main()
