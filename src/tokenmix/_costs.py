"""`tokenmix list --cost T`: what every mixer takes over T tokens, by its own formulas."""

from __future__ import annotations

from typing import Any

from ._info import usual
from .errors import MixerError
from .mixers import CORE, MIXERS

MIB = 2.0**20


def costs(T: int, dim: int) -> dict[str, dict[str, Any]]:
    """Name -> FLOPs, parameters and bytes for one sequence of T tokens, in the causal form where there is one; cheapest mixing first."""
    if T < 1 or dim < 1:
        raise MixerError(f"list: --cost and --dim must be positive, got {T} and {dim}.")
    found: dict[str, dict[str, Any]] = {}
    for name in MIXERS:
        try:
            mixer = usual(name, dim, T=T)
            cost = mixer.cost(T)
        except MixerError as why:
            found[name] = {"tier": tier(name), "missing": str(why)}
            continue
        entry = {"flops": cost.flops, "projections": cost.projections, "mixing": cost.mixing, "parameters": cost.parameters}
        found[name] = {"tier": tier(name), "causal": mixer.causal, **entry, "activations": cost.activations, "state": cost.state}
    return dict(sorted(found.items(), key=lambda item: item[1].get("mixing", float("inf"))))


def tier(name: str) -> str:
    """ "core" or "opponent"."""
    return "core" if name in CORE else "opponent"


def costs_text(found: dict[str, dict[str, Any]], T: int, dim: int) -> str:
    """The table for reading."""
    lines = [f"one sequence of T = {T} tokens, dim = {dim}, default options, causal where there is a causal form; FLOPs count a multiply and an add as two"]
    lines.append(f"{'mixer':30} {'mixing':>12} {'projections':>12} {'parameters':>12} {'kept for backward':>18} {'state':>12}")
    for name, e in found.items():
        if "missing" in e:
            lines.append(f"{name:30} {e['missing']}")
            continue
        state = f"{e['state'] / 1024:.1f} KiB" if e["state"] else "-"
        kept = f"{e['activations'] / MIB:.1f} MiB"
        lines.append(f"{name:30} {si(e['mixing']):>12} {si(e['projections']):>12} {si(e['parameters']):>12} {kept:>18} {state:>12}")
    return "\n".join(lines)


def si(n: float) -> str:
    """1234567 -> "1.23 M"."""
    for unit in ("", " k", " M", " G", " T"):
        if n < 1000 or unit == " T":
            return f"{n:.3g}{unit}"
        n /= 1000
    raise AssertionError
