"""The models and sizes of a demo, and what it measures."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...models import LMConfig, in_shell
from ...types import Spec
from ..bench import Decoding
from ..bench.cases import BenchSubject
from ..train import DataConfig, OptimConfig, RunConfig, TrainConfig

LOCAL = {"name": "aft_local", "window": 32, "rank": 32}
FORGET = {"name": "aft_forget", "norm_heads": 4}
"""In the form with which the figures of the demo were measured."""
ATTENTION = {"name": "attention", "heads": 4, "positions": {"name": "rotary", "base": 100.0}}
"""The base suits 256 bytes: after 409,600 bytes attention is at 2.56 bits per byte with it, at 2.72 with 10,000."""
SHELL = "modern"
MODELS: dict[str, tuple[Spec, ...]] = {
    "attention": (ATTENTION,),
    "aft_local": (LOCAL,),
    "aft_forget": (FORGET,),
    "hybrid_3_to_1": (LOCAL, LOCAL, LOCAL, ATTENTION),
}
CANDIDATES = tuple(
    BenchSubject(str(mixers[0]["name"]), {k: v for k, v in mixers[0].items() if k != "name"}).label
    for mixers in MODELS.values()
    if len(mixers) == 1 and mixers[0] is not ATTENTION
)
"""What ``tokenmix advise`` puts in place of attention: the mixers of the other models that have one mixer."""

RATES = {"attention": 0.012, "aft_local": 0.024, "aft_forget": 0.024, "hybrid_3_to_1": 0.012}
"""Highest learning rate of AdamW for each model: that which led in the short runs of benchmarks/sweeps/aft_parts.json.

The figures of the demo were measured with them. Over the full runs of that sweep AFT-forget and attention take half.
"""
MUON = 0.02 / 1.2e-2
"""Muon's rate, as a multiple of AdamW's."""


@dataclass(frozen=True)
class Schedule:
    """The steps of a run, and those between two evaluations."""

    steps: int
    interval: int


@dataclass(frozen=True)
class Plan:
    """The sizes of a demo.

    Args:
        seconds: training time of each model, from which its number of steps is set by a trial.
        dim: features per token.
        layers: layers of each model.
        seq_len: bytes per training sequence.
        batch_size: sequences per step.
        seed: seed of initialisation and batches.
        evals: number of evaluations of each model.
        eval_bytes: bytes of the validation split to evaluate on.
        sample_bytes: bytes of the sample that each model writes.
        contexts: context lengths at which generation is timed.
        lengths: sequence lengths at which training is timed.
        advice: sequence lengths for ``tokenmix advise``.
        advice_seconds: time for ``tokenmix advise``.
        trial_seconds: time to measure the seconds of a step of every model.
    """

    seconds: float = 120.0
    dim: int = 128
    layers: int = 4
    seq_len: int = 256
    batch_size: int = 4
    seed: int = 0
    evals: int = 3
    eval_bytes: int = 32768
    sample_bytes: int = 400
    contexts: tuple[int, ...] = (256, 1024, 8192)
    lengths: tuple[int, ...] = (256, 1024, 4096)
    advice: tuple[int, ...] = (256, 1024, 4096)
    advice_seconds: float = 16.0
    trial_seconds: float = 15.0

    def model(self, name: str, max_len: int | None = None) -> LMConfig:
        """Return the model of a row.

        A ``max_len`` beyond the trained length is for timing with random weights.
        """
        config = LMConfig(dim=self.dim, max_len=max_len or self.seq_len, mixers=MODELS[name], layers=self.layers)
        return in_shell(config, SHELL)

    def run(self, name: str, schedule: Schedule, threads: int | None = None) -> RunConfig:
        """Return the run of a row; its learning rate goes down to 0 at the last step."""
        loop = TrainConfig(
            steps=schedule.steps,
            batch_size=self.batch_size,
            seed=self.seed,
            device="cpu",
            log_every=5,
            eval_every=schedule.interval,
            threads=threads,
            eval_bytes=self.eval_bytes,
            save_every=1_000_000,
            keep=1,
        )
        optim = OptimConfig(
            name="muon",
            lr=RATES[name],
            muon_lr=MUON * RATES[name],
            betas=(0.9, 0.95),
            weight_decay=0.01,
            schedule="wsd",
            decay=0.6,
            min_lr_ratio=0.0,
            warmup=min(20, schedule.steps // 4),
        )
        return RunConfig(
            model=self.model(name),
            data=DataConfig(seq_len=self.seq_len),
            optim=optim,
            train=loop,
            recipe="demo",
            row=name,
        )


@dataclass
class Measured:
    """Speeds by model, then by length or context."""

    rates: dict[str, dict[int, float]] = field(default_factory=dict)
    decode: dict[str, dict[int, Decoding]] = field(default_factory=dict)
