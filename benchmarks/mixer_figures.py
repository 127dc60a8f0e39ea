"""Draw the pictures of the mixers' pages: what small trained models attend, fixed patterns, and the flow of data.

    python benchmarks/mixer_figures.py                       # everything; about a quarter of an hour on one core
    python benchmarks/mixer_figures.py --only hydra bigbird  # some mixers
    python benchmarks/mixer_figures.py --sketches            # the flow of data alone, in seconds

One language model of two layers is trained for each core mixer on the same bytes, the sources of Python's standard
library, with the same seed and rates, tuned for no mixer. The figures go to docs/assets/mixers, what was measured to
benchmarks/results/mixer_figures.json, from which benchmarks/docs_mixers.py writes captions and alternative texts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import ListedColormap, Normalize, PowerNorm, TwoSlopeNorm
from torch import Tensor

from mixer_sketches import flow, svg
from tokenmix.functional import use_backend
from tokenmix.lab.recipes import RECIPES
from tokenmix.lab.recipes.recipe import shrink_spec
from tokenmix.lab.report.pictures import effective_attention
from tokenmix.lab.report.runs import load_model, read_run
from tokenmix.lab.train import DataConfig, OptimConfig, RunConfig, TrainConfig, train
from tokenmix.mixers import CORE, MIXERS, build_mixer
from tokenmix.mixers.facts import mixer_options
from tokenmix.models import LMConfig

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/assets/mixers"
RESULTS = ROOT / "benchmarks/results/mixer_figures.json"
LINE = "return self.names[name]"
DIM, LAYERS, LENGTH, BATCH, STEPS = 64, 2, 64, 16, 600
SMALL = {"window": 8, "kernel_size": 7}
"""Windows and filters shorter than the line that is shown."""
SLOTS = {"slots": 16}
"""Of learned memories; their causal form takes time in proportion."""
TOKENS = 48
"""The length at which fixed patterns are drawn."""
PATTERN_OPTIONS = {
    "heads": 4, "window": 8, "stride": 7, "columns": 2, "global_tokens": 3, "radius": 5, "block": 4, "memory": 4,
    "random_blocks": 1, "global_blocks": 1, "width": 8,
}  # fmt: skip
"""Options small enough for a pattern to show at that length; a mixer takes those that it has."""
PATTERNS: dict[str, dict[str, Any]] = {
    "local": {},
    "strided": {},
    "fixed": {},
    "longformer": {},
    "etc": {},
    "bigbird": {},
    "axial": {"combine": "sum"},  # in turn, two stages reach every token
    "image_local": {"ndim": 2, "block": 2, "memory": 2},
}
"""Mixers with a fixed pattern, and options for the form that goes both ways."""
INK, FUTURE, EDGE = "#24292f", "#e4e7ec", "#8c959f"


class Map(NamedTuple):
    """One panel: its title and its weights (T, S)."""

    title: str
    weights: Tensor


def spec_of(name: str) -> dict[str, Any]:
    """Return a core mixer's spec for the small model: that of the recipe for text, with smaller options."""
    (given,) = RECIPES["text"].rows[name].mixers
    small = shrink_spec(given, seq_len=SMALL["window"], heads=4, rank=16)
    slots = SLOTS if "slots" in mixer_options(MIXERS[name]) else {}
    return {key: SMALL.get(key, value) for key, value in small.items()} | slots


def trained(name: str, steps: int) -> tuple[Any, dict[str, Any]]:
    """Train the language model of a core mixer; return it, and what its training measured."""
    model = LMConfig(dim=DIM, max_len=LENGTH, mixers=(spec_of(name),), layers=LAYERS)
    optim = OptimConfig(name="muon", lr=1e-2, muon_lr=2e-2, warmup=20, min_lr_ratio=0.0, weight_decay=0.01)
    loop = TrainConfig(
        steps=steps,
        batch_size=BATCH,
        device="cpu",
        threads=1,
        log_every=50,
        eval_every=steps,
        eval_bytes=65_536,
        save_every=steps,
        sample_bytes=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig(model, DataConfig(source="stdlib", seq_len=LENGTH), optim, loop)
        end = train(config, Path(folder) / name, verbose=False)
        found = load_model(read_run(Path(folder) / name))
    return found, {"tokens": end["tokens"], "bits_per_byte": end["valid_bits_per_byte"], "spec": spec_of(name)}


def inputs(model: Any) -> list[tuple[Any, Tensor]]:
    """Return each layer's mixer, and what it reads (1, T, D) when the model reads the line."""
    seen: list[tuple[Any, Tensor]] = []
    hooks = [
        block.mixer.register_forward_pre_hook(lambda mixer, given: seen.append((mixer, given[0].detach())))
        for block in model.blocks
    ]
    with torch.no_grad():
        model(torch.tensor([list(LINE.encode())]))
    for hook in hooks:
        hook.remove()
    return seen


def maps_of(model: Any) -> tuple[list[Map], dict[str, Any]]:
    """Choose the maps of a model: each layer's mean, then the head or feature that looks nearest and the farthest.

    Only heads and features of at least the median size count, since a map near zero shows nothing.
    """
    maps: list[Map] = []
    single: list[tuple[float, str, Tensor]] = []
    facts: dict[str, Any] = {}
    for layer, (mixer, x) in enumerate(inputs(model), 1):
        with use_backend("eager"):
            weights, kind = effective_attention(mixer, x)
        groups = len(weights)
        part = "head" if groups == getattr(mixer, "heads", None) else "feature"
        facts = {"kind": kind, "groups": groups, "part": part}
        of = "mean size" if signed(weights) else "mean"
        title = (
            f"{of} of {groups} {part}s" if groups > 1 else "size of the derivative" if kind == "jacobian" else "weights"
        )
        maps.append(Map(f"layer {layer}, {title}", weights.abs().mean(0)))
        size = weights.abs().sum((1, 2))
        loud = [g for g in range(groups) if groups > 1 and size[g] >= size.median()]
        single += [(reach(weights[g]), f"layer {layer}, {part} {g + 1}", weights[g]) for g in loud]
    if single:
        single.sort(key=lambda each: each[0])
        maps += [Map(title, weights) for _, title, weights in (single[0], single[-1])]
    return maps, facts


def reach(weights: Tensor) -> float:
    """Return how many tokens back a map looks, on average over its weights."""
    T = len(weights)
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    return float((weights.abs() * distance).sum() / weights.abs().sum().clamp_min(1e-30))


def own(weights: Tensor) -> float:
    """Return the share of a map's weight that tokens give themselves."""
    return float(weights.diagonal().abs().sum() / weights.abs().sum().clamp_min(1e-30))


def signed(weights: Tensor) -> bool:
    """Return whether a map has weights of both signs, beyond rounding."""
    return float(weights.min()) < -1e-5 * float(weights.abs().max())


def draw_maps(name: str, maps: Sequence[Map]) -> None:
    """Write the maps of one model, two in a row, each on its own scale."""
    rows = len(maps) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(4.8, 2.62 * rows + 0.2), layout="constrained")
    characters = LINE.replace(" ", "␣")
    future = torch.ones(len(LINE), len(LINE)).triu(1).bool()
    for ax, (title, weights) in zip(axes.flat, maps, strict=True):
        limit = float(weights.abs().max())
        both = signed(weights)
        norm: Normalize = TwoSlopeNorm(0, -limit, limit) if both else PowerNorm(0.5, 0, limit)
        colours = plt.get_cmap("RdBu_r" if both else "YlGnBu").with_extremes(bad=FUTURE)
        ax.imshow(torch.where(future, torch.nan, weights), cmap=colours, norm=norm, interpolation="nearest")
        ax.set_title(f"{title}\n{'±' if both else '0 to '}{limit:.2g}", fontsize=8, pad=3)
        _letters(ax, characters)
    axes.flat[0].set_ylabel("reads", labelpad=1)
    axes.flat[0].set_xlabel("is read", labelpad=1)
    save(figure, f"{name}_map")


def _letters(ax: Any, characters: str) -> None:
    ax.set_xticks(range(len(characters)), characters, fontsize=6.2, family="monospace")
    ax.set_yticks(range(len(characters)), characters, fontsize=6.2, family="monospace", ha="center")
    ax.tick_params(axis="x", length=0, pad=1, colors=INK)
    ax.tick_params(axis="y", length=0, pad=4, colors=INK)


def attended(name: str, *, causal: bool) -> dict[str, Tensor]:
    """Return which pairs a mixer with random weights attends, bool (T, S), by the heads that attend them.

    A pair counts where its weight is not 0, or the derivative of the output for mixers that attend in stages.
    """
    known = mixer_options(MIXERS[name])
    options = {key: value for key, value in PATTERN_OPTIONS.items() if key in known}
    options |= {key: value for key, value in PATTERNS[name].items() if not (causal and key == "combine")}
    torch.manual_seed(0)
    mixer = build_mixer(name, 32, causal=causal, **options)
    with use_backend("eager"):
        weights = effective_attention(mixer, torch.randn(1, TOKENS, 32)).weights
    pairs = weights.abs() > 1e-9 * float(weights.abs().max())
    found: dict[str, Tensor] = {}
    for i, each in enumerate(pairs):
        same = [str(j + 1) for j, other in enumerate(pairs) if torch.equal(each, other)]
        if same[0] == str(i + 1):
            found[f"head{'s' if len(same) > 1 else ''} {' and '.join(same)}"] = each
    return found


def draw_pattern(name: str) -> dict[str, Any]:
    """Write which pairs a mixer attends, causal and both ways; return what is drawn."""
    known = mixer_options(MIXERS[name])
    found = {}
    if MIXERS[name].facts.causal:
        found["causal"] = attended(name, causal=True)
    if not MIXERS[name].facts.causal_only:
        found["both ways"] = attended(name, causal=False)
    shown = [(form, heads, pairs) for form, sets in found.items() for heads, pairs in [*sets.items()][:2]]
    across = min(2, len(shown))
    down = -(-len(shown) // across)
    size = (4.8, 2.62 * down)
    figure, axes = plt.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    colours = ListedColormap(["white", "#2c7fb8", FUTURE])
    for ax, (form, heads, pairs) in zip(axes.flat, shown, strict=True):
        kinds = pairs.int()
        if form == "causal":
            kinds[torch.ones_like(pairs).triu(1)] = 2
        ax.imshow(kinds, cmap=colours, vmin=0, vmax=2, interpolation="nearest")
        ax.set_title(f"{form}, {heads}" if len(found[form]) > 1 else form, fontsize=8, pad=3)
        between = [j - 0.5 for j in range(1, TOKENS)]
        ax.set_xticks(between, minor=True)
        ax.set_yticks(between, minor=True)
        ax.grid(which="minor", color="#eaeef2", linewidth=0.4)
        ax.tick_params(which="both", length=0, labelsize=7, colors=INK)
        ax.set_xticks(range(0, TOKENS, 8))
        ax.set_yticks(range(0, TOKENS, 8))
    axes.flat[0].set_ylabel("query t")
    axes.flat[0].set_xlabel("key s")
    save(figure, f"{name}_pattern")
    return {
        "tokens": TOKENS,
        "options": {key: value for key, value in PATTERN_OPTIONS.items() if key in known} | PATTERNS[name],
        "sets": {
            form: [{"heads": heads, "pairs": int(pairs.sum())} for heads, pairs in sets.items()]
            for form, sets in found.items()
        },
    }


def save(figure: Any, name: str) -> None:
    """Write a figure as a PNG without a date or a version in it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / f"{name}.png", dpi=160, facecolor="white", metadata={"Software": None})
    plt.close(figure)


def sketch(name: str) -> None:
    """Write the flow of data of a mixer."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}_flow.svg").write_text(svg(flow(name)))


def record(part: str, name: str, facts: dict[str, Any]) -> None:
    """Write what was found for one mixer into the file of results, beside what it holds."""
    known: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    found = {"model": {}, "maps": {}, "patterns": {}} | known
    found["model"] = {"line": LINE, "dim": DIM, "layers": LAYERS, "length": LENGTH}
    found[part] = {key: ({**found[part], name: facts})[key] for key in MIXERS if key in {*found[part], name}}
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Draw the figures of the mixers asked for, one after another."""
    every = tuple(dict.fromkeys((*CORE, *PATTERNS)))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(every), choices=every, help="mixers to draw")
    parser.add_argument("--sketches", action="store_true", help="draw the flow of data alone")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of each model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    plt.rcParams.update({"font.size": 7.5, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": EDGE})
    for name in given.only:
        if name in CORE:
            sketch(name)
        if name in PATTERNS and not given.sketches:
            record("patterns", name, draw_pattern(name))
    for name in given.only if not given.sketches else ():
        if name not in CORE:
            continue
        model, measured = trained(name, given.steps)
        maps, facts = maps_of(model)
        draw_maps(name, maps)
        panels = [{"title": m.title, "reach": reach(m.weights), "own": own(m.weights)} for m in maps]
        record("maps", name, {**measured, **facts, "signed": any(signed(m.weights) for m in maps), "panels": panels})
        print(f"{name}: {measured['bits_per_byte']:.3f} bits per byte on held-out text", flush=True)


if __name__ == "__main__":
    main()
