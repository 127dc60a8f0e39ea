"""Measure what makes a model smaller or cheaper: shared layers, int8 weights, LoRA, bfloat16.

    python -m benchmarks.efficiencies --out runs/efficiencies              # measure what is missing, print it
    python -m benchmarks.efficiencies --out runs/efficiencies --record     # and keep it in results/efficiencies.json

Byte language models of 4 layers x 128 in the modern shell without added positions, trained on the Python sources with
the rates of the recipe ``text``: one seed, one thread. Scores are bits per byte of the first ``SCORED`` bytes of a
validation split. LoRA adapts them to English, enwik8, which is downloaded where it is not in the cache. A part that is
in the folder is not measured again, and a run that was stopped continues.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.data import Sampler, open_corpus
from tokenmix.lab.recipes import find_recipe
from tokenmix.lab.train import RunConfig, evaluate, load_run, resume, train

RECORD = Path(__file__).parent / "results" / "efficiencies.json"
LAYERS, LENGTH, BATCH, STEPS = 4, 256, 4, 300
SCORED, CHUNK, WINDOW = 32_768, 256, 1_000
MARKS = (1_000, 10_000, 100_000)
GROWING_LONGEST = 10_000
"""Attention's work grows with the square of the stream, so it is followed this far only."""
RANK, ADAPT_STEPS, ADAPT_RATE, TUNE_RATE = 8, 150, 5e-3, 1e-3
TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "up", "gate", "down"]
MIXERS = ("attention", "aft_forget", "linear", "hydra")
PAIR = MIXERS[:2]
SPECS: dict[str, Any] = {"aft_forget": [{"name": "aft_forget", "norm_heads": 4}]}
"""Mixers in a form that is not the recipe's."""
SHARED: dict[str, dict[str, Any]] = {
    "4 layers": {},
    "1 layer, 4 times": {"model.layers": 1, "model.loop": {"times": LAYERS}},
    "1 layer": {"model.layers": 1},
}


def config_of(mixer: str, **changes: Any) -> RunConfig:
    """Return the run of a mixer."""
    small = {"data.seq_len": LENGTH, "train.steps": STEPS, "train.batch_size": BATCH, "train.threads": 1}
    small |= {"train.eval_every": STEPS, "train.save_every": 100, "train.eval_bytes": SCORED, "train.device": "cpu"}
    spec = {"model.mixers": SPECS[mixer]} if mixer in SPECS else {}
    return (
        find_recipe("text")
        .config(mixer, "smoke", "modern")
        .override(small | {"model.positions": None} | spec | changes)
    )


def trained(out: Path, name: str, config: RunConfig) -> Any:
    """Return the model of a run, trained to its end from wherever it stood."""
    folder = out / name.replace(" ", "_").replace(",", "")
    torch.set_num_threads(1)
    resume(folder, verbose=False) if (folder / "config.json").exists() else train(config, folder, verbose=False)
    return load_run(folder)[0]


def bits(model: nn.Module, source: str = "stdlib", **options: Any) -> float:
    """Return a model's bits per byte on the validation split of a corpus."""
    data = open_corpus(source).split("valid")
    return round(evaluate(model, data, seq_len=LENGTH, max_bytes=SCORED, **options).bits_per_byte, 4)


def parameters(model: nn.Module, *, trainable: bool = False) -> int:
    """Count the parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def shared(out: Path, mixer: str) -> dict[str, Any]:
    """Measure layers that share their weights beside layers that do not, and beside one layer alone."""
    found = {}
    for row, changes in SHARED.items():
        model = trained(out, f"{mixer} {row}", config_of(mixer, **changes))
        found[row] = {"parameters": parameters(model), "bits": bits(model)}
    return found


def quantized(model: nn.Module) -> nn.Module:
    """Return a copy with int8 weights in its linear layers, whose inputs are rounded to int8 in each call."""
    from torch.ao.quantization import quantize_dynamic

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def rounded(model: nn.Module) -> nn.Module:
    """Return a copy whose linear layers hold float32 numbers on an int8 grid of each row, as weight-only forms do."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for layer in copied.modules():
            if isinstance(layer, nn.Linear):
                step = layer.weight.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
                layer.weight.copy_((layer.weight / step).round() * step)
    return copied


def weight_bytes(model: nn.Module) -> int:
    """Count the bytes of all weights; those of a quantised layer are one each, with float32 biases."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    for layer in model.modules():
        if isinstance(layer, torch.ao.nn.quantized.dynamic.Linear):
            bias = layer.bias()
            total += layer.weight().numel() + (0 if bias is None else 4 * bias.numel())
    return total


def int8(out: Path, mixer: str) -> dict[str, Any]:
    """Measure a model with int8 weights: bytes, loss, and how far it drifts from the float32 one as they stream."""
    model = trained(out, f"{mixer} 4 layers", config_of(mixer))
    small = quantized(model)
    found: dict[str, Any] = {"bytes": weight_bytes(model), "int8_bytes": weight_bytes(small)}
    found |= {"bits": bits(model), "int8_bits": bits(small), "rounded_bits": bits(rounded(model))}
    last = GROWING_LONGEST if mixer == "attention" else MARKS[-1]
    return found | {"drift": drift(model, small, [mark for mark in MARKS if mark <= last])}


@torch.no_grad()
def drift(model: Any, small: Any, marks: list[int]) -> dict[str, dict[str, float]]:
    """Stream the same bytes through both; before each mark, compare losses and logits of ``WINDOW`` bytes, and states.

    Distances are root mean squares of the difference, relative to those of the float32 model: of logits without their
    mean over the vocabulary, and of all tensors of the state.
    """
    data = open_corpus("stdlib").split("valid")[: marks[-1] + 1].long()
    states, found = [model.init_state(1), small.init_state(1)], {}
    kept = [torch.empty(0, model.vocab)] * 2  # the last logits of both
    # a window begins with a chunk
    edges = sorted({*range(0, marks[-1], CHUNK), *marks, *(mark - WINDOW for mark in marks)})
    for begin, end in zip(edges, edges[1:], strict=False):
        for i, each in enumerate((model, small)):
            logits, states[i] = each.extend(data[None, begin:end], states[i])
            kept[i] = torch.cat([kept[i], logits[0]])[-WINDOW:]
        if end in marks:
            float_, int_ = kept
            wanted = data[end - WINDOW + 1 : end + 1]
            found[str(end)] = {
                "bits": _bits(float_, wanted),
                "int8_bits": _bits(int_, wanted),
                "logits": _distance([int_ - int_.mean(-1, True)], [float_ - float_.mean(-1, True)]),
                "states": _distance(*(_numbers(state.layers) for state in reversed(states))),
            }
    return found


def _bits(logits: Tensor, wanted: Tensor) -> float:
    return round(float(F.cross_entropy(logits, wanted)) / math.log(2), 4)


def _numbers(state: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _distance(got: list[Tensor], want: list[Tensor]) -> float:
    off, size = (sum(float(a.double().square().sum()) for a in each) for each in (_less(got, want), want))
    return float(f"{math.sqrt(off / size):.3g}")


def _less(a: list[Tensor], b: list[Tensor]) -> list[Tensor]:
    return [x.double() - y.double() for x, y in zip(a, b, strict=True)]


def lora(out: Path, mixer: str) -> dict[str, Any]:
    """Adapt a model of Python to English, by LoRA and by all its weights."""
    import tokenmix.hosts.torchvision  # noqa: F401  # before peft, which imports transformers

    import peft  # isort: skip

    base = trained(out, f"{mixer} 4 layers", config_of(mixer))
    found = {"before": {"trainable": 0, "bits": bits(base, "enwik8"), "bits_before": bits(base)}}
    adapter = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS))
    for row, model, rate in (("lora", adapter, ADAPT_RATE), ("all weights", copy.deepcopy(base), TUNE_RATE)):
        _adapt(model, rate)
        count = parameters(model, trainable=True)
        plain = model.merge_and_unload() if row == "lora" else model
        found[row] = {"trainable": count, "bits": bits(plain, "enwik8"), "bits_before": bits(plain)}
    return found


def _adapt(model: nn.Module, rate: float) -> None:
    torch.manual_seed(0)
    batches = Sampler(open_corpus("enwik8").split("train"), seq_len=LENGTH, batch_size=BATCH, seed=0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    model.train()
    for step in range(ADAPT_STEPS):
        x, y = batches.batch(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / ADAPT_STEPS)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def bfloat16(out: Path, mixer: str) -> dict[str, Any]:
    """Train in float32 and under autocast to bfloat16, and score each both ways."""
    found = {}
    for row, changes in (("fp32", {}), ("bf16", {"train.precision": "bf16"})):
        name = f"{mixer} 4 layers" + (" bf16" if changes else "")
        model = trained(out, name, config_of(mixer, **changes))
        found[row] = {precision: bits(model, precision=precision) for precision in ("fp32", "bf16")}
    return found


PARTS: dict[str, tuple[Callable[[Path, str], dict[str, Any]], tuple[str, ...]]] = {
    "shared": (shared, PAIR),
    "int8": (int8, MIXERS),
    "lora": (lora, PAIR),
    "bfloat16": (bfloat16, PAIR),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"machine": machine()}
    found |= {"steps": STEPS, "tokens": STEPS * BATCH * LENGTH, "adapt_steps": ADAPT_STEPS, "rank": RANK}
    for part, (measure, mixers) in PARTS.items():
        for mixer in mixers:
            kept = given.out / f"{part}_{mixer}.json"
            if not kept.exists():
                kept.write_text(json.dumps(measure(given.out, mixer)))
            found.setdefault(part, {})[mixer] = json.loads(kept.read_text())
            print(part, mixer, json.dumps(found[part][mixer]), flush=True)
        if given.record:
            RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
