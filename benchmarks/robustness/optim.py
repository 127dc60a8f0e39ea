"""The optimiser's groups."""

from __future__ import annotations

from torch import nn

import tokenmix
from tokenmix.lab.train import OptimConfig
from tokenmix.lab.train.optim import parameter_groups

from . import attempt


@attempt("m", "optim.mixer_lr on position biases and tables")
def mixer_rate() -> str:
    """Those in a child module of the mixer kept the plain rate."""
    said = {}
    for name, options in {
        "aft_full": {},
        "aft_local": {"window": 3},
        "synthesizer_random": {},
        "aft_conv": {"heads": 2, "kernel_size": 3},
    }.items():
        mixer = tokenmix.build_mixer(name, 8, **options, **({} if name == "aft_conv" else {"max_len": 8}))
        names = {id(p): n for n, p in mixer.named_parameters()}
        groups = parameter_groups(nn.ModuleDict({"mixer": mixer}), OptimConfig(mixer_lr=3.0))
        said[name] = (
            " ".join(sorted(names[id(p)] for group in groups if group["scale"] == 3.0 for p in group["params"]))
            or "nothing"
        )
    return "; ".join(f"{name}: {what}" for name, what in said.items())
