"""Measure what papers claim of time and memory as directions: which of two things takes less, three times in turns.

    python -m benchmarks.directions                       # print the table, a few minutes
    python -m benchmarks.directions --record              # and keep it in results/directions.json
    python -m benchmarks.directions --record --only maps  # measure one group again

A row is one call of a model or layer as the paper has it, on one thread, float32, batch 1 unless it says otherwise. The
rows of a group take turns in one process: CPU time of the call, and its peak memory beyond what was there before. The
claims in ``src/tokenmix/lab/papers/sources`` compare rows; ``tokenmix.lab.papers.ours`` decides them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks import scaling, translation_speed
from torch import Tensor, nn

from tokenmix import build_mixer, functional, use_backend
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.bench.timing import peak_memory, sampler
from tokenmix.lab.recipes import RECIPES
from tokenmix.models import Block, build_model
from tokenmix.models.one_hot import to_gather

RECORD = Path(__file__).parent / "results" / "directions.json"
REPEATS, LEAST_MS = 3, 100
Call = Callable[[], Any]


def eager(call: Call) -> Call:
    """Return a call that computes attention by plain products, as the papers did before fused kernels."""

    def run() -> None:
        with use_backend("eager"):
            call()

    return run


def training_pass(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Call:
    """Return a forward and backward pass."""
    leaves = [p for p in model.parameters() if p.requires_grad]
    return lambda: torch.autograd.grad(loss(model), leaves, allow_unused=True) and None


def inference(name: str, size: int = 224, batch: int = 1, **options: Any) -> Call:
    """Return a forward pass of a named model on random images."""
    torch.manual_seed(0)
    model, images = build_model(name, image_size=(size, size), **options).eval(), torch.randn(batch, 3, size, size)
    return torch.no_grad()(partial(model, images))


def density() -> dict[str, Call]:
    """Build one of the 24 layers of Table 2 of AFT: 3,072 sub-pixels, forward and backward."""
    found, tokens = {}, torch.randint(256, (1, 3072))
    rows = {
        "Transformer": "transformer_24x256",
        "AFT-local 256": "aft_local_256_24x256",
        "AFT-simple": "aft_simple_24x256",
    }
    for name, row in rows.items():
        config = RECIPES["aft_cifar10_density"].config(f"table2/{row}", "paper").model
        model = build_model(replace(config, layers=1))
        found[f"{name}, 3,072 sub-pixels"] = training_pass(
            model, lambda model: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        )
    found["Transformer by plain products, 3,072 sub-pixels"] = eager(found["Transformer, 3,072 sub-pixels"])
    return found


def text() -> dict[str, Call]:
    """Build Table 4 of AFT with a twelfth of the layers: 1,024 bytes, forward and backward."""
    found, tokens = {}, torch.randint(256, (1, 1025))
    rows = {"Transformer 12 x 512": "transformer_12x512", "AFT-local 32, 24 x 256": "aft_local_32_24x256"}
    for name, row in rows.items():
        config = RECIPES["aft_enwik8"].config(f"table4/{row}", "paper").model
        model = build_model(replace(config, layers=config.layers // 12))
        found[f"{name}, 1,024 bytes"] = training_pass(
            model, lambda model: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        )
    plain = "Transformer 12 x 512 by plain products, 1,024 bytes"
    found[plain] = eager(found["Transformer 12 x 512, 1,024 bytes"])
    return found


def images() -> dict[str, Call]:
    """Build models of Table 7 of AFT, four images of 224 x 224."""
    return {name: inference(name, batch=4) for name in ("deit_tiny", "aft_full_tiny", "aft_conv_tiny_k11_h32")}


def images_384() -> dict[str, Call]:
    """Build the models of Table 8 of AFT, an image of 384 x 384."""
    return {name: inference(name, 384) for name in ("deit_base_384", "aft_conv_base384_k25_h32")}


HYDRA = {"no layer": "deit_base", "the last 8 layers": "hydra_deit_base_last8", "all layers": "hydra_deit_base"}


def hydra(size: int, *layers: str) -> dict[str, Call]:
    """Build DeiT-B with Hydra in no layer, in the last eight or in all."""
    return {f"Hydra in {which}, {size} x {size}": inference(HYDRA[which], size) for which in layers}


def heads() -> dict[str, Call]:
    """Build one block of DeiT-B at 224, batch 2, forward and backward, with softmax or kernel attention."""
    found, x = {}, torch.randn(2, 197, 768)
    for kind, counts in (("attention", (12, 96)), ("multihead_linear", (1, 3, 12, 768))):
        for n in counts:
            step = training_pass(
                Block(768, {"name": kind, "heads": n}, causal=False, max_len=197),
                lambda block: block(x).square().mean(),
            )
            name = "softmax" if kind == "attention" else "cosine"
            found[f"{name}, {n} head{'s' * (n > 1)}"] = eager(step) if kind == "attention" else step
    return found


def flash() -> dict[str, Call]:
    """Build layers of 256 features, 2,048 tokens, forward and backward."""
    rows = {
        "fused attention": "attention, fused",
        "linear attention": "linear attention",
        "Performer": "Performer",
        "Linformer": "Linformer, both directions",
    }
    return {f"{name}, 2,048 tokens": scaling.build_step(scaling.ROWS[row], 2048, 256) for name, row in rows.items()}


def encoders() -> dict[str, Call]:
    """Build layers of 256 features that read 512 tokens in both directions, forward and backward."""
    rows = {
        "factorised random Synthesizer": scaling.Row(
            {"name": "synthesizer_factorized_random"}, heads=True, causal=False
        ),
        "Linformer": scaling.ROWS["Linformer, both directions"],
    }
    return {f"{name}, 512 tokens": scaling.build_step(row, 512, 256) for name, row in rows.items()}


def external() -> dict[str, Call]:
    """Build layers of 512 features on a map of 64 x 64, forward; double attention is linear attention by softmaxes."""
    specs = {
        "external attention": {"name": "external"},
        "self-attention": {"name": "attention", "heads": 1},
        "simplified self-attention": {"name": "simplified_attention"},
        "double attention": {"name": "multihead_linear", "heads": 1, "feature": "softmax"},
    }
    x = torch.randn(1, 4096, 512)
    return {
        f"{name}, map of 64 x 64": torch.no_grad()(partial(build_mixer(dim=512, **spec), x))
        for name, spec in specs.items()
    }


def widths() -> dict[str, Call]:
    """Build the operations alone on 1,024 tokens of one head: once on 1,024 features, or four times on 256."""
    found: dict[str, Call] = {}
    forms = {
        "linear attention": partial(functional.linear_attention, heads=1, backend="eager"),
        "AFT-simple": partial(functional.aft_simple, backend="eager"),
    }
    for name, form in forms.items():
        whole, part = (tuple(torch.randn(1, 1024, d) for _ in range(3)) for d in (1024, 256))
        found[f"{name}, 1,024 features"] = partial(form, *whole)
        found[f"{name}, 4 x 256 features"] = lambda form=form, part=part: [form(*part) for _ in range(4)] and None
    return found


def maps() -> dict[str, Call]:
    """Build backbones whose finest map has a cell for 4 x 4 pixels, on 192 x 192 pixels."""
    found = {
        "PVT-tiny, map of 48 x 48": inference("pvt_tiny", 192),
        "ViT-tiny, map of 48 x 48": inference("deit_tiny", 192, patch=4),
    }
    found["ViT-tiny by plain products, map of 48 x 48"] = eager(found["ViT-tiny, map of 48 x 48"])
    return found


def one_tap() -> dict[str, Call]:
    """Build AFT-conv with a single tap in each filter, as a convolution and as indexing."""
    torch.manual_seed(0)
    model, image = build_model("aft_conv_tiny_k11_h32").eval(), torch.randn(1, 3, 224, 224)
    found = {"filters of 11 x 11": model, "one tap as indexing": to_gather(model).eval()}
    return {name: torch.no_grad()(partial(one, image)) for name, one in found.items()}


def dropped_patches() -> dict[str, Call]:
    """Build DeiT-tiny with Hydra on two images of 224 x 224, with all patches and with a quarter of them."""
    torch.manual_seed(0)
    model, images = build_model("deit_tiny", mixers=({"name": "hydra"},)).eval(), torch.randn(2, 3, 224, 224)
    keep = torch.arange(0, 196, 4).expand(2, -1)
    return {
        "Hydra, all patches": torch.no_grad()(partial(model.forward_features, images)),
        "Hydra, a quarter of the patches": torch.no_grad()(partial(model.forward_features, images, keep=keep)),
    }


def translation() -> dict[str, Call]:
    """Build rows of the recipe translation for 256 tokens, one step of training."""
    rows = {"attention": "attention", "random Synthesizer": "synthesizer_random", "DynamicConv": "dynamicconv"}
    return {f"{name}, 256 tokens": translation_speed.Row(row, 256).train for name, row in rows.items()}


def eamlp() -> dict[str, Call]:
    """Build two sizes of EAMLP, an image of 224 x 224."""
    return {name: inference(name) for name in ("eamlp_14", "eamlp_19")}


GROUPS: dict[str, Callable[[], dict[str, Call]]] = {
    "density": density,
    "text": text,
    "images": images,
    "images_384": images_384,
    "hydra_224": partial(hydra, 224, *HYDRA),
    "hydra_384": partial(hydra, 384, "no layer", "all layers"),
    "heads": heads,
    "encoders": encoders,
    "external": external,
    "flash": flash,
    "widths": widths,
    "maps": maps,
    "one_tap": one_tap,
    "dropped": dropped_patches,
    "translation": translation,
    "eamlp": eamlp,
}


def measure_group(calls: dict[str, Call]) -> dict[str, dict[str, list[float]]]:
    """Return name -> milliseconds of CPU time and MiB at the peak, one of each for every repeat."""
    often = {name: max(1, round(LEAST_MS / (1e3 * sampler(call)(1)[1] + 1e-3))) for name, call in calls.items()}
    found: dict[str, dict[str, list[float]]] = {name: {"ms": [], "MiB": []} for name in calls}
    for repeat in range(REPEATS):
        for name in list(calls)[:: -1 if repeat % 2 else 1]:
            taken: list[float] = []
            peak = peak_memory(lambda name=name, taken=taken: taken.append(sampler(calls[name])(often[name])[1]))
            found[name]["ms"].append(round(1e3 * taken[0], 4))
            found[name]["MiB"].append(round((peak or 0) / 2**20, 3))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS), help="groups to measure")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = json.loads(RECORD.read_text())["rows"] if RECORD.is_file() else {}
    for group in given.only:
        print(group)
        rows |= (found := measure_group(GROUPS[group]()))
        for name, row in found.items():
            print(f"  {name:52}", *(f"{value:9.1f}" for value in row["ms"] + row["MiB"]), flush=True)
        if given.record:
            RECORD.write_text(json.dumps({"machine": machine(), "threads": 1, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
