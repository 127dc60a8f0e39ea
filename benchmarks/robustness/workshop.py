"""What a mixer of one's own meets: a causal form only, views by head, zeros at masked positions, words of a failure."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import torch
from torch import nn

import tokenmix
from tokenmix.mixers import Attention, Facts, Mixer
from tokenmix.testing import ContractError, check_mixer, main_check

from . import attempt


class Running(Mixer):
    """The running sum of the values, which has a causal form only."""

    facts = Facts(causal=True, causal_only=True)

    def __init__(self, dim: int, *, causal: bool = True):
        super().__init__(dim, causal=causal)
        self.v_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def mix(self, inputs):
        x, key_mask = inputs.x, inputs.key_mask
        v = self.v_proj(x) if key_mask is None else torch.where(key_mask[..., None], self.v_proj(x), 0.0)
        return self.out_proj(v.cumsum(1).unflatten(-1, (2, -1)).flatten(-2))


class Zeros(Attention):
    """Softmax attention with 0 at masked positions."""

    def mix(self, inputs):
        y, mask = super().mix(inputs), inputs.key_mask
        return y if mask is None or inputs.context is not None else torch.where(mask[..., None], y, 0.0)


@attempt("1", "A mixer with a causal form only is registered: what does the doctor say?")
def doctor() -> str:
    """It tried the bidirectional form of everything."""
    from tokenmix.lab.cli.doctor import diagnose

    tokenmix.register_mixer("running", Running)
    found = diagnose()
    return f"{', '.join(label for label in found['forward'] if label.startswith('running'))}; broken: {found['broken']}"


@attempt("2", "A mixer with a causal form only in an encoder, where tokens see both sides")
def encoder() -> str:
    """It was built, and every token read the past alone."""
    from tokenmix.models import EncoderConfig, build_model

    tokenmix.register_mixer("running", Running)
    build_model(EncoderConfig(dim=8, layers=1, vocab=11, max_len=16, mixers=({"name": "running"},)))
    return "built"


@attempt("3", "tokenmix check of a right layer that calls unflatten(-1, (2, -1))")
def unflatten() -> str:
    """torch.compile refuses it under a device mode, which check entered for the CPU."""
    tokenmix.register_mixer("running", Running)
    said = io.StringIO()
    with redirect_stdout(said):
        main_check("running", {"causal": True})
    return next(line for line in said.getvalue().splitlines() if "compiles" in line)[:120]


@attempt("4", "Attention that puts 0 at masked positions, which the contract leaves open")
def zeros() -> str:
    """Two promises compared what they leave open."""
    from tokenmix import functional, reference

    given = {"reference": reference.attention, "functional": functional.attention}
    names = ["equals_reference", "nothing_to_attend", "attn_mask_equals_causal"]
    try:
        check_mixer(Zeros, {"heads": 2}, promises=names, **given)
    except ContractError as why:
        return f"broken: {', '.join(r.promise for r in why.report.failures)}"
    return "kept"


@attempt("5", "An error of 9.89e-04 where 9.60e-04 is allowed")
def words() -> str:
    """Both were printed as if the error were allowed."""
    from tokenmix.testing.report import Broken, same

    one = torch.ones(1, 1, 1, dtype=torch.float64)
    try:
        same(one + 9.89e-4, one, "they differ", tol=9.6e-4)
    except Broken as why:
        return str(why)
    return "not noticed"
