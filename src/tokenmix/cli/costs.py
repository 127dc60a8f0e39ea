"""`tokenmix list --cost T`: what every mixer takes over T tokens, by its own formulas."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import MixerError
from ..mixers import MIXERS, example_mixer
from ..system.text import si, size


def costs(T: int, dim: int) -> dict[str, dict[str, Any]]:
    """Name -> FLOPs, parameters and bytes for one sequence of T tokens, in the causal form where there is one; cheapest mixing first."""
    if T < 1 or dim < 1:
        raise MixerError(f"list: --cost and --dim must be positive, got {T} and {dim}.")
    found: dict[str, dict[str, Any]] = {}
    for name in MIXERS:
        try:
            with torch.device("meta"):  # only sizes are asked for
                mixer = example_mixer(name, dim, T=T)
            cost = mixer.cost(T)
        except MixerError as why:
            found[name] = {"tier": MIXERS[name].about.tier, "missing": str(why)}
            continue
        entry = {"flops": cost.flops, "projections": cost.projections, "mixing": cost.mixing, "parameters": cost.parameters}
        found[name] = {"tier": MIXERS[name].about.tier, "causal": mixer.causal, **entry, "activations": cost.activations, "state": cost.state}
    return dict(sorted(found.items(), key=lambda item: item[1].get("mixing", float("inf"))))


def costs_text(found: dict[str, dict[str, Any]], T: int, dim: int) -> str:
    """The table for reading."""
    lines = [f"one sequence of T = {T:,} tokens, dim = {dim}, float32, default options, causal where there is a causal form; cheapest mixing first"]
    lines.append("mixing, projections: FLOPs, a multiply and an add count as two; kept: bytes for backward; state: bytes of streaming state after T tokens")
    lines.append(f"{'mixer':30} {'tier':9} {'form':13} {'mixing':>9} {'projections':>12} {'parameters':>11} {'kept':>10} {'state':>10}")
    for name, e in found.items():
        if "missing" in e:
            lines.append(f"{name:30} {e['missing']}")
            continue
        form, state = ("causal", size(e["state"])) if e["causal"] else ("bidirectional", "-")
        numbers = f"{si(e['mixing']):>9} {si(e['projections']):>12} {si(e['parameters']):>11} {size(e['activations']):>10} {state:>10}"
        lines.append(f"{name:30} {e['tier']:9} {form:13} {numbers}")
    return "\n".join(lines)
