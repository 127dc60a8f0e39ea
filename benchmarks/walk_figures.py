"""Draw the pictures of the page "From attention to AFT": what small trained models weigh, step by step.

    python -m benchmarks.walk_figures         # trains ten models for some seconds each, writes docs/assets/walk/*.png

Every model is trained on the text of the project's licence, with the same seed, and reads the same line of it. The same
machine draws the same pictures again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.colors import Normalize, PowerNorm, TwoSlopeNorm
from torch import Tensor

from tokenmix.functional import use_backend
from tokenmix.lab.report.pictures import effective_attention
from tokenmix.mixers import Inputs
from tokenmix.models import LMConfig, build_model

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/assets/walk"
LINE = b"Work or Derivative Works"
DIM, LAYERS, LENGTH, ROWS, STEPS = 64, 2, 48, 16, 200
PANELS = 3
BACKGROUND, FUTURE, INK = "#ffffff", "#e4e7ec", "#24292f"
"""Pictures carry their own background, so that they read the same on a light and on a dark page."""

SPECS: dict[str, dict[str, Any]] = {
    "attention": {"name": "attention", "heads": 4},
    "keys": {"name": "aft_conv", "heads": 4, "kernel_size": 1},  # with its one tap frozen at 0
    "aft_simple": {"name": "aft_simple"},
    "aft_full": {"name": "aft_full", "rank": 16},
    "aft_local": {"name": "aft_local", "window": 8, "rank": 16},
    "aft_forget": {"name": "aft_forget", "half_lives": (1.0, 256.0)},
    "hydra": {"name": "hydra"},
    "external": {"name": "external", "slots": 16},
    "synthesizer": {"name": "synthesizer_random", "heads": 4},
    "linear": {"name": "linear", "heads": 4},
}


def trained(spec: dict[str, Any], text: Tensor, steps: int) -> Any:
    """Train a language model of one mixer on a text (bytes), and return it."""
    torch.manual_seed(0)
    model = build_model(LMConfig(dim=DIM, max_len=LENGTH, mixers=(spec,), layers=LAYERS))
    for name, parameter in model.named_parameters():  # one key per head, and no bias for any pair
        parameter.requires_grad_(not (spec.get("kernel_size") == 1 and name.endswith(("raw", "gamma", "beta"))))
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "proj" in n or ".mlp." in n and p.ndim == 2]
    rest = [p for p in model.parameters() if p.requires_grad and not any(p is m for m in matrices)]
    optimizers = [torch.optim.AdamW(rest, lr=0.02), torch.optim.Muon(matrices, lr=0.03, weight_decay=0.0)]
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (ROWS,))
        rows = text[starts[:, None] + torch.arange(LENGTH + 1)]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("first", group["lr"]) * (1 - step / steps)
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return model.eval()


def input_of(model: Any, layer: int) -> tuple[Any, Tensor]:
    """Return a layer's mixer, and what it reads (1, T, D) when the model reads the line."""
    seen: list[Tensor] = []
    mixer = model.blocks[layer].mixer
    hook = mixer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    with torch.no_grad():
        model(torch.tensor([list(LINE)]))
    hook.remove()
    return mixer, seen[0]


def weights_of(mixer: Any, x: Tensor) -> Tensor:
    """Return the weights (G, T, S) of all heads or features, without the gate of the query: rows sum to one."""
    with use_backend("eager"):
        weights = effective_attention(mixer, x).weights
    return weights / weights.sum(-1, keepdim=True)


def varied(weights: Tensor, count: int) -> list[int]:
    """Choose maps (G, T, S) from the one that looks farthest back to the one that looks nearest, in equal ranks."""
    T = weights.shape[1]
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0)
    order = (weights.abs() * distance).sum((1, 2)).argsort()
    return [int(order[i * (len(order) - 1) // (count - 1)]) for i in range(count)]


def decayed(mixer: Any, x: Tensor) -> Tensor:
    """Return the weights of AFT-forget, exp(k_s + g_{s+1} + ... + g_t) over their sum: (D, T, S)."""
    with torch.no_grad():
        (_, k, _, g), _ = mixer.functional_args(Inputs(x))
    total = g[0].T.double().cumsum(-1)
    logits = k[0].T.double()[:, None] + total[:, :, None] - total[:, None]
    return logits.masked_fill(future(len(LINE)), -torch.inf).softmax(-1).float()


def slots(mixer: Any, x: Tensor) -> Tensor:
    """Return how much each token reads of each slot of External attention: (T, S)."""
    with torch.no_grad():
        logits = mixer.q_proj(x)[0] @ mixer.memory_k.T
        weights = (logits - logits.logcumsumexp(0)).exp()  # softmax over the tokens so far, in each slot
    return weights / weights.sum(-1, keepdim=True)


def future(T: int) -> Tensor:
    """Return which pairs lie in the future: bool (T, T)."""
    return torch.ones(T, T).triu(1).bool()


def pair_bias(mixer: Any) -> Tensor:
    """Return the bias w of AFT-full or AFT-local for the tokens of the line: (T, T)."""
    at = torch.arange(len(LINE))[None]
    with torch.no_grad():
        return mixer.pair_log_weights(at, at)[0].float().masked_fill(future(len(LINE)), 0.0)


def draw(name: str, maps: list[tuple[str, Tensor]], *, signed: bool = False, bar: str = "weight") -> None:
    """Write one picture: maps (T, S) side by side; the first may have a scale of its own."""
    text = LINE.decode().replace(" ", "␣")
    figure, axes = plt.subplots(1, len(maps), figsize=(7.2, 2.35), layout="constrained", facecolor=BACKGROUND)
    shared = max(float(m.abs().max()) for title, m in maps if "bias" not in title)
    for ax, (title, weights) in zip(axes, maps, strict=True):
        own = title.startswith("bias")
        norm: Normalize = TwoSlopeNorm(0, -shared, shared) if signed else PowerNorm(0.5, 0, shared)
        limit = float(weights.abs().max())
        norm = TwoSlopeNorm(0, -limit, limit) if own else norm
        colours = plt.get_cmap("RdBu_r" if signed or own else "YlGnBu").with_extremes(bad=FUTURE)
        shown = torch.where(future(len(LINE)), torch.nan, weights)
        image = ax.imshow(shown, cmap=colours, norm=norm, interpolation="nearest")
        ax.set_title(title, fontsize=7.5, pad=4)
        ax.set_xticks(range(len(text)), text, fontsize=5.2, family="monospace")
        ax.set_yticks(range(len(text)), text, fontsize=5.2, family="monospace")
        ax.tick_params(length=0, pad=1.5, colors=INK)
        if ax is axes[0]:
            ax.set_ylabel("token t that reads")
        ax.set_xlabel("token s that is read")
        if own or ax is axes[-1]:
            figure.colorbar(image, ax=ax, label="w" if own else bar, shrink=0.72, pad=0.02)
    save(figure, name)


def draw_wide(name: str, weights: Tensor, rows: str) -> None:
    """Write one picture of a single map (rows, T) with the tokens of the line across."""
    text = LINE.decode().replace(" ", "␣")
    figure, ax = plt.subplots(figsize=(7.2, 2.35), layout="constrained", facecolor=BACKGROUND)
    norm = PowerNorm(0.5, 0, float(weights.max()))
    image = ax.imshow(weights, cmap="YlGnBu", norm=norm, aspect="auto", interpolation="nearest")
    ax.set_xticks(range(len(text)), text, fontsize=7, family="monospace")
    ax.tick_params(length=0, colors=INK)
    ax.set_ylabel(rows)
    figure.colorbar(image, ax=ax, label="weight", pad=0.01)
    save(figure, name)


def save(figure: Any, name: str) -> None:
    """Write a figure as a PNG without a date or a version in it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    figure.savefig(FOLDER / f"{name}.png", dpi=190, facecolor=BACKGROUND, metadata={"Software": None})
    plt.close(figure)


def of_heads(weights: Tensor) -> list[tuple[str, Tensor]]:
    """Label the maps of some heads, from the nearest look to the farthest."""
    return [(f"head {i + 1} of {len(weights)}", weights[i]) for i in varied(weights, PANELS)]


def of_features(weights: Tensor, count: int = PANELS) -> list[tuple[str, Tensor]]:
    """Label some features' maps, from the nearest look to the farthest."""
    return [(f"feature {i} of {len(weights)}", weights[i]) for i in varied(weights, count)]


def biased(name: str, mixer: Any, x: Tensor) -> None:
    """Draw the bias w, and the weights of two features."""
    draw(name, [("bias w, for all features", pair_bias(mixer)), *of_features(weights_of(mixer, x), PANELS - 1)])


def hydra(name: str, mixer: Any, x: Tensor) -> None:
    """Draw Hydra's weights in its loudest features; they have signs and are not normalised."""
    with use_backend("eager"):
        weights = effective_attention(mixer, x).weights
    loudest = weights.abs().sum((1, 2)).topk(PANELS).indices.tolist()
    draw(name, [(f"feature {i} of {len(weights)}", weights[i]) for i in loudest], signed=True)


def simple(name: str, mixer: Any, x: Tensor) -> None:
    """Draw what the last token weighs in each feature, and the maps of some features."""
    weights = weights_of(mixer, x)
    draw_wide("features", weights[:, -1], "feature")
    draw(name, of_features(weights))


DRAWN: dict[str, tuple[int, Callable[[str, Any, Tensor], None]]] = {
    "attention": (1, lambda name, mixer, x: draw(name, of_heads(weights_of(mixer, x)))),
    "keys": (0, lambda name, mixer, x: draw(name, of_heads(weights_of(mixer, x)[:: DIM // 4]))),
    "aft_simple": (0, simple),
    "aft_full": (0, biased),
    "aft_local": (0, biased),
    "aft_forget": (0, lambda name, mixer, x: draw(name, of_features(decayed(mixer, x)))),
    "hydra": (0, hydra),
    "external": (0, lambda name, mixer, x: draw_wide(name, slots(mixer, x).T, "slot")),
    "synthesizer": (0, lambda name, mixer, x: draw(name, of_heads(weights_of(mixer, x)))),
    "linear": (0, lambda name, mixer, x: draw(name, of_heads(weights_of(mixer, x)))),
}
"""The layer that each picture shows, and how it is drawn."""


def main() -> None:
    """Train the models one after another, and draw each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(SPECS), choices=list(SPECS), help="pictures to draw")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of each model")
    given = parser.parse_args()
    torch.set_num_threads(1)
    plt.rcParams.update({"font.size": 7, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": "#8c959f"})
    text = torch.tensor(list((ROOT / "LICENSE").read_bytes()))
    for name in given.only:
        model = trained(SPECS[name], text, given.steps)
        layer, picture = DRAWN[name]
        mixer, x = input_of(model, layer)
        picture(name, mixer, x)
        with torch.no_grad():
            rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
            loss = F.cross_entropy(model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten()) / 0.6931
        print(f"{name}: {float(loss):.2f} bits per byte of its training text", flush=True)


if __name__ == "__main__":
    main()
