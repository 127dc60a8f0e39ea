"""Replace the attention of a trained causal language model, and measure nats per character.

The figures are those before and after the surgery, and after a short distillation on the model's own samples.

    python benchmarks/surgery_llama.py --model babyllama [--steps 300] [--out runs/surgery_llama] [--rows ...]

``--model``: a folder with a llama2.c checkpoint (``*.bin``: seven int32, then float32 weights) and its vocabulary
(``*.vocab``, one character a line). The model writes its own training text; half of its layers (every second from the
back), then all of them, become AFT-local, AFT-conv or Hydra, with their projections copied. Written to
benchmarks/results/surgery_llama.json after each row; finished rows are not run again.
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
from whole_models import RESULTS

LENGTH, BATCH, BOS = 256, 16, 1
TRAIN_TEXTS, TEST_TEXTS = 1024, 64
MIXERS: dict[str, dict[str, Any]] = {
    "aft_local": {"name": "aft_local", "window": 32, "rank": 16},
    "aft_conv": {"name": "aft_conv", "heads": 8, "kernel_size": 31},
    "hydra": {"name": "hydra"},
}
SCHEDULES: dict[str, dict[str, int]] = {"half": {"every": 2}, "all": {}}


def read_llama(folder: Path) -> tuple[Any, list[str]]:
    """Read a llama2.c checkpoint as transformers' LlamaForCausalLM, and its characters."""
    from tokenmix.system.torchvision import ensure_torchvision

    ensure_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    file = next(folder.glob("*.bin"))
    header = torch.from_file(str(file), dtype=torch.int32, size=7)
    dim, hidden, layers, heads, kv_heads, vocab, length = (int(n) for n in header)
    floats = torch.from_file(str(file), dtype=torch.float32, size=file.stat().st_size // 4)[7:]
    taken = 0

    def take(*shape: int) -> Tensor:
        nonlocal taken
        size = int(torch.tensor(shape).prod())
        taken += size
        return floats[taken - size : taken].reshape(shape).clone()

    head = dim // heads
    parts = {
        "embed": take(vocab, dim),
        "norm1": take(layers, dim),
        "q": take(layers, dim, dim),
        "k": take(layers, kv_heads * head, dim),
    }
    parts |= {"v": take(layers, kv_heads * head, dim), "o": take(layers, dim, dim), "norm2": take(layers, dim)}
    parts |= {
        "gate": take(layers, hidden, dim),
        "down": take(layers, dim, hidden),
        "up": take(layers, hidden, dim),
        "norm": take(dim),
    }
    sizes = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": length,
    }
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=hidden,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        **sizes,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(_named(parts, layers, heads, kv_heads), strict=False)
    lines = next(folder.glob("*.vocab")).read_text().split("\n")
    return model.eval(), [line.rpartition("\t")[0] for line in lines if line]


def _named(parts: dict[str, Tensor], layers: int, heads: int, kv_heads: int) -> dict[str, Tensor]:
    """Rename the checkpoint's tensors to transformers' names.

    llama2.c rotates pairs of adjacent features, transformers pairs from the two halves.
    """
    found = {
        "model.embed_tokens.weight": parts["embed"],
        "lm_head.weight": parts["embed"],
        "model.norm.weight": parts["norm"],
    }
    for i in range(layers):
        at = f"model.layers.{i}"
        found |= {
            f"{at}.self_attn.q_proj.weight": halves(parts["q"][i], heads),
            f"{at}.self_attn.k_proj.weight": halves(parts["k"][i], kv_heads),
        }
        found |= {f"{at}.self_attn.v_proj.weight": parts["v"][i], f"{at}.self_attn.o_proj.weight": parts["o"][i]}
        found |= {f"{at}.mlp.{name}_proj.weight": parts[name][i] for name in ("gate", "up", "down")}
        found |= {
            f"{at}.input_layernorm.weight": parts["norm1"][i],
            f"{at}.post_attention_layernorm.weight": parts["norm2"][i],
        }
    return found


def halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder rows 0 1 2 3 .. of each head as 0 2 .. 1 3 .."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


@torch.no_grad()
def samples(model: Any, count: int, seed: int) -> Tensor:
    """Sample texts (count, LENGTH) from the model itself, from the start symbol, at temperature 1."""
    torch.manual_seed(seed)
    start = torch.full((64, 1), BOS)
    options = {
        "do_sample": True,
        "top_k": 0,
        "min_new_tokens": LENGTH - 1,
        "max_new_tokens": LENGTH - 1,
        "pad_token_id": 0,
    }
    return torch.cat(
        [model.generate(start, attention_mask=torch.ones_like(start), **options) for _ in range(count // 64)]
    )


@torch.no_grad()
def nats(model: Any, texts: Tensor) -> float:
    """Return the mean nats per character after the first."""
    logits = torch.cat([model(part).logits for part in texts.split(BATCH)])
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten()))


def readable(ids: Tensor, characters: list[str]) -> str:
    """Return a text up to the next start symbol."""
    text = "".join(characters[i] for i in ids.tolist()[1:] if i > 2)
    return text.replace("▁", " ").replace("<0x0A>", "\n").strip()


@torch.no_grad()
def story(model: Any, characters: list[str], cached: bool = True) -> str:
    """Return what the model writes at temperature 0.7."""
    torch.manual_seed(1)
    start = torch.full((1, 1), BOS)
    options = {
        "do_sample": True,
        "temperature": 0.7,
        "max_new_tokens": LENGTH - 1,
        "pad_token_id": 0,
        "use_cache": cached,
    }
    return readable(model.generate(start, attention_mask=torch.ones_like(start), **options)[0], characters)


def row(
    model: Any, spec: dict[str, Any], schedule: dict[str, int], texts: tuple[Tensor, Tensor], out: Path, steps: int
) -> tuple[Any, dict[str, Any]]:
    """Replace attention in one model and measure it before and after distillation."""
    learn, test = texts
    student, report = replace_mixers(model, {"model.layers.*": spec}, seed=0, **schedule)
    found: dict[str, Any] = {"replaced": nats(student, test), "copied_share": report.share}
    began = time.perf_counter()
    batches = [{"input_ids": part} for part in learn.split(BATCH)]
    distill(model, student, batches, out=out, layer_steps=steps // 2, steps=steps - steps // 2, lr=2e-3, verbose=False)
    student.eval()
    return student, {**found, "distilled": nats(student, test), "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("runs/surgery_llama"))
    labels = [f"{part} {name}" for part in SCHEDULES for name in MIXERS]
    parser.add_argument("--rows", nargs="+", default=labels, choices=labels)
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS.joinpath("surgery_llama.json")
    found = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "steps": given.steps, "rows": {}}
    model, characters = read_llama(given.model)
    texts = samples(model, TRAIN_TEXTS, 0), samples(model, TEST_TEXTS, 1)
    found["untouched"], found["story"] = nats(model, texts[1]), story(model, characters)
    print(f"untouched {found['untouched']:.4f} nats per character\n{found['story']}\n", flush=True)
    for label in given.rows:
        part, name = label.split()
        if label not in found["rows"]:
            student, entry = row(model, MIXERS[name], SCHEDULES[part], texts, given.out / f"{part}_{name}", given.steps)
            found["rows"][label] = {**entry, "story": story(student, characters)}
            path.write_text(json.dumps(found, indent=1) + "\n")
        entry = found["rows"][label]
        print(
            f"{label:16} replaced {entry['replaced']:.4f}, distilled {entry['distilled']:.4f}  "
            f"({entry['seconds']:.0f} s)\n  {entry['story']}\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
