"""`tokenmix list --cost T`: FLOPs, parameters and bytes of every mixer over T tokens, by its own formulas."""

from __future__ import annotations

import torch

from ...errors import MixerError
from ...mixers import MIXERS, example_mixer
from ...system.text import si, size
from ...types import Record


def costs(T: int, dim: int) -> dict[str, Record]:
    """Return the cost of every mixer for one sequence of T tokens, by name, cheapest mixing first.

    A mixer that has a causal form is counted in it. "missing" says why a mixer cannot be built for this length.
    """
    if T < 1 or dim < 1:
        raise MixerError(f"list: --cost and --dim must be positive, got {T} and {dim}.")
    found: dict[str, Record] = {}
    for name in MIXERS:
        try:
            with torch.device("meta"):  # only sizes are needed, so nothing is allocated
                mixer = example_mixer(name, dim, T=T)
            cost = mixer.cost(T)
        except MixerError as why:
            found[name] = {"tier": MIXERS[name].facts.about.tier, "missing": str(why)}
            continue
        found[name] = {
            "tier": MIXERS[name].facts.about.tier,
            "causal": mixer.causal,
            "flops": cost.flops,
            "projections": cost.projections,
            "mixing": cost.mixing,
            "parameters": cost.parameters,
            "activations": cost.activations,
            "state": cost.state,
        }
    return dict(sorted(found.items(), key=lambda item: item[1].get("mixing", float("inf"))))


def costs_text(found: dict[str, Record], T: int, dim: int) -> str:
    """Return the table as text."""
    setting = f"one sequence of T = {T:,} tokens, dim = {dim}, float32, default options, causal if supported"
    heading = f"{'mixer':30} {'tier':9} {'form':13} {'mixing':>9} {'projections':>12}"
    lines = [
        f"{setting}; cheapest mixing first",
        "mixing, projections: FLOPs (multiply-add = 2); kept: bytes for backward; state: bytes after T streamed tokens",
        f"{heading} {'parameters':>11} {'kept':>10} {'state':>10}",
    ]
    for name, e in found.items():
        if "missing" in e:
            lines.append(f"{name:30} {e['missing']}")
            continue
        form, state = ("causal", size(e["state"])) if e["causal"] else ("bidirectional", "-")
        flops = f"{si(e['mixing']):>9} {si(e['projections']):>12}"
        sizes = f"{si(e['parameters']):>11} {size(e['activations']):>10} {state:>10}"
        lines.append(f"{name:30} {e['tier']:9} {form:13} {flops} {sizes}")
    return "\n".join(lines)
