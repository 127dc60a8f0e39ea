"""The models and sizes of a demo, and what it measures."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...models import LMConfig, in_shell
from ...types import Spec
from ..bench import Decoding
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
RATES = {"attention": 0.012, "aft_local": 0.024, "aft_forget": 0.024, "hybrid_3_to_1": 0.012}
"""Highest learning rate of AdamW for each model: that which led in the short runs of benchmarks/sweeps/aft_parts.json.

The figures of the demo were measured with them. Over the full runs of that sweep AFT-forget and attention take half.
"""
MUON = 0.02 / 1.2e-2
"""Muon's rate, as a multiple of AdamW's."""


@dataclass(frozen=True)
class Plan:
    """The sizes of a demo.

    Args:
        steps: updates of each model, so that all of them read the same text, on any machine.
        dim: features per token.
        layers: layers of each model.
        seq_len: bytes per training sequence.
        batch_size: sequences per step.
        seed: seed of initialisation and batches.
        evals: number of evaluations of each model.
        eval_bytes: bytes of the validation split to evaluate on.
        sample_bytes: bytes of the sample that each model writes.
        contexts: context lengths at which generation is timed.
        trial_seconds: time to measure the seconds of a step of every model, for the estimate at the start.
    """

    steps: int = 700
    dim: int = 128
    layers: int = 4
    seq_len: int = 256
    batch_size: int = 4
    seed: int = 0
    evals: int = 3
    eval_bytes: int = 32768
    sample_bytes: int = 400
    contexts: tuple[int, ...] = (256, 1024, 8192)
    trial_seconds: float = 5.0

    @property
    def tokens(self) -> int:
        """The bytes of text that each model is trained on."""
        return self.steps * self.batch_size * self.seq_len

    def model(self, name: str, max_len: int | None = None) -> LMConfig:
        """Return the model of a row.

        A ``max_len`` beyond the trained length is for timing with random weights.
        """
        config = LMConfig(dim=self.dim, max_len=max_len or self.seq_len, mixers=MODELS[name], layers=self.layers)
        return in_shell(config, SHELL)

    def run(self, name: str, steps: int) -> RunConfig:
        """Return the run of a row; its learning rate goes down to 0 at the last step.

        It has one thread, with which a machine gives the same numbers however many cores it has.
        """
        loop = TrainConfig(
            steps=steps,
            batch_size=self.batch_size,
            seed=self.seed,
            device="cpu",
            log_every=5,
            eval_every=-(-steps // self.evals),
            threads=1,
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
            warmup=min(20, steps // 4),
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
    """Generation by model, then by context."""

    decode: dict[str, dict[int, Decoding]] = field(default_factory=dict)
