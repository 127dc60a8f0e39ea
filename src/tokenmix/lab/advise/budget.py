"""Measure what replacing each layer saves and costs, and choose the layers for a budget of time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf, isfinite

import torch
from torch import nn

from ...errors import MixerError
from ...hosts.surgery import replace_mixers
from ...hosts.surgery.capture import adapters_by_site, final_output, output_loss
from ...system.calls import call_model
from ..bench.timing import measure, quartile, sampler
from .advice import Advice
from .candidates import OWN, Tell
from .distill import chosen_spec
from .layer_plan import Layer, LayerPlan, choose_layers
from .loading import Host
from .measuring import LEAST_TURNS, MOST_TURNS, SPREAD, Clock, plain_torch, time_pass


def check_budget(host: Host) -> None:
    """Refuse a model in which ``replace_mixers`` replaces nothing."""
    if host.origin == "tokenmix":
        hint = "name the mixers of its layers in its config"
        raise MixerError(
            f"advise: --budget plans for models of other libraries, and {host.name} is one of ours; {hint}."
        )


@torch.no_grad()
def plan_layers(
    advice: Advice,
    budget: float,
    *,
    seconds: float = 20.0,
    data: Sequence[object] | None = None,
    device: str = "cpu",
    tell: Tell = lambda _: None,
) -> LayerPlan:
    """Choose the layers in which the candidate of the choice replaces attention, with the projections copied, so that
    the model is ``budget`` times as fast at the length of the choice.

    Args:
        seconds: approximate time for timing.
        data: batches on which costs are measured; None: random inputs of this length.
    """
    spec, host, model = chosen_spec(advice), advice.host, advice.host.model
    assert advice.choice is not None
    length = advice.choice.row.length
    host.inputs.fit(model, length)
    given = host.inputs.make(length, advice.batch)
    batches = [given] if data is None else data
    tell("timing the layers")
    replaced = replace_mixers(model, spec, seed=0)[0]
    speedup = advice.choice.row.speedup or 1.0
    with plain_torch(advice.modules):
        whole, saved = time_layers(model, replaced, lambda m: call_model(m, given), speedup, seconds / 2, device)
    del replaced
    wanted = [call_model(model, batch) for batch in batches]

    def cost(student: nn.Module) -> float:
        pairs = zip(batches, wanted, strict=True)
        found = [float(output_loss(call_model(student, batch), output, None, 1.0)) for batch, output in pairs]
        return sum(found) / len(found) if all(map(isfinite, found)) else inf

    layers = []
    for name, saves in saved.items():
        tell(f"replacing {name} alone")
        layers.append(Layer(name, saves, cost(replace_mixers(model, {name: spec}, seed=0)[0])))
    target = whole * (1 - 1 / budget)
    picked = choose_layers([x.cost for x in layers], [x.saves for x in layers], target)
    chosen = tuple(x for i, x in enumerate(layers) if (x.saves > 0 if picked is None else i in picked))
    ratio, together = None, 0.0
    if chosen:
        tell("timing the model with the chosen layers replaced")
        student = replace_mixers(model, {x.name: spec for x in chosen}, seed=0)[0]
        ratio = measure_speed(model, student, lambda m: call_model(m, given), seconds / 2, device)
        together = cost(student)
    where = f"at {length:,} {host.inputs.unit}, batch {advice.batch}"
    logits = final_output(wanted[0])[1]
    reachable = picked is not None or (ratio is not None and ratio[0] >= budget)
    return LayerPlan(
        budget, spec, where, whole, tuple(layers), logits, chosen, reachable, ratio, together, data is not None
    )


def time_layers(
    model: nn.Module,
    replaced: nn.Module,
    call: Callable[[nn.Module], object],
    speedup: float,
    budget: float,
    device: str,
) -> tuple[float, dict[str, float]]:
    """Return the seconds of a pass of the model, and those that each replaced layer saves in it, by name.

    The two models take turns, with clocks around the layers; of each the lower quartile counts, as the load of the
    machine only adds. Where the whole replaced model was measured to be faster, what it saves is divided among the
    layers in proportion to these.

    Args:
        speedup: of the whole replaced model, measured.
    """
    sites = {name: list(adapter.origin[0]) for name, adapter in adapters_by_site(replaced).items()}
    clocks = [
        [
            Clock([m.get_submodule(f"{name}.{path}".strip(".")) for path in paths], device)
            for name, paths in sites.items()
        ]
        for m in (model, replaced)
    ]
    passes: list[float] = []
    began = time.perf_counter()
    while len(passes) <= LEAST_TURNS or (len(passes) < MOST_TURNS and time.perf_counter() - began < budget):
        passes.append(time_pass(lambda: call(model), clocks[0], device))
        time_pass(lambda: call(replaced), clocks[1], device)
    # the first pass warmed up
    own, new = ([quartile(sorted(clock.seconds()[1:])) for clock in row] for row in clocks)
    whole, saved = quartile(sorted(passes[1:])), [a - b for a, b in zip(own, new, strict=True)]
    scale = whole * (1 - 1 / speedup) / sum(saved) if speedup > 1 and sum(saved) > 0 else 1.0
    return whole, {name: scale * seconds for name, seconds in zip(sites, saved, strict=True)}


def measure_speed(
    model: nn.Module, student: nn.Module, call: Callable[[nn.Module], object], budget: float, device: str
) -> tuple[float, float, float]:
    """Return the quartiles of the ratios of two passes timed one after the other, the model's over the student's."""
    samplers = {name: sampler(partial(call, m), device=device) for name, m in ((OWN, model), ("chosen", student))}
    return measure(samplers, budget=budget, against=OWN, settle=SPREAD)["chosen"].ratio
