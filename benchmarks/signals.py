"""Measure how loud each causal mixer of the core is at its start, by position, and what its parameters then receive.

    python -m benchmarks.signals              # print the tables
    python -m benchmarks.signals --record     # and keep them in results/signals.json

Signal: values are independent normal numbers, as after a norm, and the weights are those of a new model of 4 x 128 in
the modern shell. The number is the standard deviation of what the mixer writes (the input of ``out_proj``) at a
position, divided by that of the values it averages (the output of ``v_proj``, or x where there is none). Gradients: the
root mean square of the gradient of each role of parameters, times 10^6, at the first step and after ``STEPS`` steps on
the Python sources with the recipe's tuned optimiser.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.data import Sampler, open_corpus
from tokenmix.lab.recipes import find_recipe
from tokenmix.lab.train.optim import build_optimizers, parameter_roles, update
from tokenmix.mixers import CORE, MIXERS, mixer_options
from tokenmix.models import LMConfig, build_model, in_shell

RECORD = Path(__file__).parent / "results" / "signals.json"
DIM, LAYERS, LENGTH, LONG, ROWS, STEPS = 128, 4, 256, 4096, 4, 60
POSITIONS = (1, 4, 16, 64, 256, 1024, 4096)
NORMED = "aft_forget, norm"
OPTIONS: dict[str, Any] = {"heads": 4, "window": 32, "rank": 32, "kernel_size": 31, "slots": 64}


def spec(name: str) -> dict[str, Any]:
    """Return a mixer's spec with the options of the quality tables, as far as it has them."""
    if name == NORMED:
        return {"name": "aft_forget", "norm_heads": OPTIONS["heads"]}
    known = mixer_options(MIXERS[name])
    own = set() if "ndim" in known else {"kernel_size"}  # 31 taps are those of a filter in place of attention
    return {"name": name} | {option: value for option, value in OPTIONS.items() if option in set(known) - own}


def model_of(name: str, length: int) -> Any:
    """Build a new language model of one mixer."""
    torch.manual_seed(0)
    config = LMConfig(dim=DIM, max_len=length, mixers=(spec(name),), layers=LAYERS)
    return build_model(in_shell(config, "modern"))


def heard(model: Any, length: int) -> dict[int, float]:
    """Return the signal of the first layer's mixer by position."""
    mixer, seen = model.blocks[0].mixer, {}

    def keep(name: str, what: int) -> Any:
        return lambda module, given, out: seen.__setitem__(name, (given[0], out)[what].detach())

    hooks = [mixer.out_proj.register_forward_hook(keep("written", 0))]
    values = getattr(mixer, "v_proj", None)
    if isinstance(values, nn.Linear):
        hooks.append(values.register_forward_hook(keep("values", 1)))
    x = torch.randn(ROWS, length, DIM, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mixer(x)
    for hook in hooks:
        hook.remove()
    written, scale = seen["written"], float(seen.get("values", x).std())
    return {t: round(float(_near(written, t).std()) / scale, 4) for t in POSITIONS if t <= length}


def _near(x: Tensor, t: int) -> Tensor:
    """Return the rows about position t, more of them where there are more."""
    return x[:, t - 1 - t // 16 : t]


def gradients(model: Any) -> dict[str, list[float]]:
    """Return the gradient of each role of parameters at the first step and after ``STEPS`` steps."""
    optim, roles = find_recipe("text").config("attention", "smoke", "modern").optim, parameter_roles(model)
    optimizers = build_optimizers(model, optim)
    batches = Sampler(open_corpus("stdlib").split("train"), seq_len=LENGTH, batch_size=4, seed=0)
    found: dict[str, list[float]] = {}
    for step in range(STEPS + 1):
        x, y = batches.batch(step)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        if step in (0, STEPS):
            for role in dict.fromkeys(roles.values()):
                grads = [
                    p.grad.flatten() for n, p in model.named_parameters() if roles[n] == role and p.grad is not None
                ]
                found.setdefault(role, []).append(float(torch.cat(grads).square().mean().sqrt()) * 1e6)
        update(model, optimizers, optim, step, 10 * STEPS)
    return {role: [float(f"{value:.3g}") for value in values] for role, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    for name in [*(name for name in CORE if MIXERS[name].facts.causal), NORMED]:
        whole = LONG if "max_len" not in mixer_options(MIXERS[spec(name)["name"]]) or name == "attention" else LENGTH
        trained = model_of(name, LENGTH)
        rows[name] = {"start": heard(model_of(name, whole), whole), "gradients": gradients(trained)}
        rows[name]["after"] = heard(trained, LENGTH)
        print(name, json.dumps(rows[name]), flush=True)
    if given.record:
        record = {"machine": machine(), "steps": STEPS, "mixers": rows}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
