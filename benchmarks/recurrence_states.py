"""Draw what the state of a gated recurrence holds after each write, by each of the four rules.

    python -m benchmarks.recurrence_states    # writes docs/assets/walk/recurrence.png; the numbers are computed

Three keys, orthogonal and of length 1, and four values; the first key is written twice. The keys are axes of the state,
so that the row of a key is what the state answers to it.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from tokenmix.functional import recurrence
from tokenmix.functional.recurrence import Rule
from walk_figures import BACKGROUND, INK, save

WRITES = ((0, 0), (1, 1), (2, 2), (0, 3))
"""The key and the value of each token."""
KEYS = "abc"
KEPT = 0.7
"""How much of the state a decay leaves, by token."""
CAPTIONS = {
    "linear": "linear: each write adds",
    "gated": f"gated: all fades to {KEPT}, then adds",
    "delta": "delta: replaces what the key held",
    "gated_delta": f"gated_delta: all fades to {KEPT}, then replaces",
}


def states(rule: Rule) -> Tensor:
    """Return the state after each write, (tokens, keys, values)."""
    k, v = (torch.eye(4)[list(at)][None, :, None] for at in zip(*WRITES, strict=True))
    k = k[..., :3]
    options = {"decay": torch.full((1, len(WRITES), 1), math.log(KEPT))} if "gated" in rule else {}
    every: Tensor = recurrence(k, k, v, rule=rule, scale=1.0, keep="every", **options)[1]
    return every[0, :, 0]


def draw() -> None:
    """Write the picture: a rule in each row, a token in each column, what key a reads in the end beside them."""
    rules: tuple[Rule, ...] = get_args(Rule)
    figure, axes = plt.subplots(len(rules), len(WRITES), figsize=(7.2, 5.2), layout="constrained", facecolor=BACKGROUND)
    for down, rule in enumerate(rules):
        every = states(rule)
        for across, (key, value) in enumerate(WRITES):
            write = f"token {across + 1} writes {KEYS[key]} → v{value + 1}" if down == 0 else ""
            lead = f"{CAPTIONS[rule]}\n" if across == 0 else ""
            axes[down, across].set_title(f"{lead}{write}".rstrip(), fontsize=8, color=INK, loc="left", pad=4)
            _draw_state(axes[down, across], every[across])
        held = [(_short(share), n + 1) for n, share in enumerate(every[-1, 0].tolist()) if share > 1e-6]
        read = " + ".join(f"v{n}" if share == "1" else f"{share} v{n}" for share, n in held)
        axes[down, -1].text(1.04, 0.83, f"a reads\n{read}", transform=axes[down, -1].transAxes, fontsize=8, va="center")
    save(figure, "recurrence")


def _short(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _draw_state(ax: Any, state: Tensor) -> None:
    ax.imshow(state, cmap="Blues", vmin=0, vmax=1.2, interpolation="nearest")
    for i, j in torch.cartesian_prod(*(torch.arange(n) for n in state.shape)).tolist():
        number = float(state[i, j])
        if number > 1e-6:
            colour = "white" if number > 0.75 else INK
            ax.text(j, i, _short(number), ha="center", va="center", fontsize=8, color=colour)
    ax.set_yticks(range(len(KEYS)), KEYS, fontsize=8)
    ax.set_xticks(range(state.shape[1]), [f"v{n + 1}" for n in range(state.shape[1])], fontsize=8)
    ax.tick_params(length=0, colors=INK)
    for edge in ax.spines.values():
        edge.set_color("#8c959f")


if __name__ == "__main__":
    draw()
