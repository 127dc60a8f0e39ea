"""``make demo``: four small language models, compared at equal wall-clock time and at equal tokens on one page.

It runs as ``python -m tokenmix.demo``.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..advise import advise, load_host
from ..advise.text import findings as advice_findings
from ..advise.text import shares_table
from ..bench import Decoding, decoding, stops_winning, training_rate
from ..data import open_corpus
from ..errors import MixerError
from ..models import LMConfig, build_model
from ..report import Run, Table, read_run, write_report
from ..system.files import whole_file
from ..system.text import number, size
from ..train import DataConfig, OptimConfig, RunConfig, TrainConfig, sample_run, train

LOCAL = {"name": "aft_local", "window": 32, "rank": 32}
ATTENTION = {"name": "attention", "heads": 4}
MODELS: dict[str, tuple[dict[str, Any], ...]] = {
    "attention": (ATTENTION,),
    "aft_local": (LOCAL,),
    "aft_simple": ({"name": "aft_simple"},),
    "hybrid_3_to_1": (LOCAL, LOCAL, LOCAL, ATTENTION),
}
# Start-up, evaluation and measurements take about this many times as long as the trial of one step of each model.
TRIALS = 16


@dataclass(frozen=True)
class Plan:
    """The sizes of a demo.

    Args:
        seconds: training time of each model.
        dim: features per token.
        layers: layers of each model.
        seq_len: bytes per training sequence.
        batch_size: sequences per step.
        lr: learning rate after warm-up.
        seed: seed of initialisation and batches.
        evals: approximate number of evaluations of the slowest model.
        eval_bytes: bytes of the validation split to evaluate on.
        sample_bytes: bytes of the sample that each model writes.
        contexts: context lengths at which generation is timed.
        lengths: sequence lengths at which training is timed.
        advice: sequence lengths for ``tokenmix advise``.
        advice_seconds: time for ``tokenmix advise``.
    """

    seconds: float = 60.0
    dim: int = 128
    layers: int = 4
    seq_len: int = 256
    batch_size: int = 4
    lr: float = 4e-3
    seed: int = 0
    evals: int = 4
    eval_bytes: int = 32768
    sample_bytes: int = 400
    contexts: tuple[int, ...] = (256, 1024, 4096, 16384)
    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    advice: tuple[int, ...] = (256, 1024, 4096)
    advice_seconds: float = 6.0

    def model(self, name: str, max_len: int | None = None) -> LMConfig:
        """Return the model of a row.

        A ``max_len`` beyond the trained length is for timing with random weights.
        """
        return LMConfig(dim=self.dim, max_len=max_len or self.seq_len, mixers=MODELS[name], layers=self.layers)

    def run(self, name: str, eval_every: int) -> RunConfig:
        """Return the run of a row.

        The learning rate stays constant after warm-up, so that a model that is stopped early is not in the middle of
        its decay.
        """
        loop = TrainConfig(
            steps=None,
            max_seconds=self.seconds,
            batch_size=self.batch_size,
            seed=self.seed,
            device="cpu",
            log_every=5,
            eval_every=eval_every,
            eval_bytes=self.eval_bytes,
            save_every=1_000_000,
            keep=1,
        )
        optim = OptimConfig(lr=self.lr, schedule="constant", warmup=20)
        return RunConfig(model=self.model(name), data=DataConfig(seq_len=self.seq_len), optim=optim, train=loop, recipe="demo", row=name)


@dataclass
class Measured:
    """Speeds by model, then by length or context."""

    rates: dict[str, dict[int, float]] = field(default_factory=dict)
    decode: dict[str, dict[int, Decoding]] = field(default_factory=dict)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run the demo."""
    parser = argparse.ArgumentParser(prog="python -m tokenmix.demo", description="Train four small byte language models and compare them in one page.")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="directory for the runs and report.html")
    parser.add_argument("--minutes", type=float, default=5.0, help="approximate total time; a little more on a fast machine")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    try:
        demo(free_name(given.out), Plan(seed=given.seed), minutes=given.minutes)
    except MixerError as why:
        print(f"demo: {why}", file=sys.stderr)
        return 2
    return 0


def free_name(out: Path) -> Path:
    """Return ``out``, or ``out-2``, ``out-3`` ... so that earlier demos are not overwritten."""
    names = [out, *(out.with_name(f"{out.name}-{i}") for i in range(2, 1000))]
    return next(p for p in names if not p.exists())


def demo(out: Path, plan: Plan, *, minutes: float | None = None) -> Path:
    """Train and measure the models, write the page, print the table. Returns the page's path.

    With ``minutes``, the training time is set so that everything takes about as long.
    """
    began, busy = time.perf_counter(), busy_note()
    say(f"The corpus is the Python standard library, {open_corpus('stdlib').size:,} bytes. " + "Timing one step of each model ...")
    rates = in_new_process(trial, plan)
    if minutes is not None:
        plan = replace(plan, seconds=round(max(5.0, (60 * minutes - plan.advice_seconds - (1 + TRIALS) * (time.perf_counter() - began)) / len(MODELS))))
    steps = {name: max(1, int(plan.seconds * rate / (plan.batch_size * plan.seq_len))) for name, rate in rates.items()}
    eval_every = max(1, min(steps.values()) // plan.evals)
    for i, name in enumerate(MODELS, 1):
        say(f"[{i}/{len(MODELS)}] {name}: training for {plan.seconds:.0f} s, about {steps[name]:,} steps, evaluated " + f"every {eval_every} ...")
        done = in_new_process(train_one, plan, name, eval_every, out / name)
        say(f"      {done['step']:,} steps, {done['valid_bits_per_byte']:.3f} bits per byte, " + f"{done['tokens_per_s']:,.0f} tokens/s")
    say("Measuring speed of generation and training by length, all models side by side ...")
    measured = in_new_process(measure, plan)
    say("Running tokenmix advise: should the attention of the trained Transformer be replaced? ...")
    advised, share = in_new_process(advice, plan, out / "attention")
    runs = {name: read_run(out / name) for name in MODELS}
    equal = equal_tokens(runs)
    tables = [
        main_table(plan, runs, equal, measured),
        by_length("Training speed by sequence length, tokens/s", measured.rates, 0),
        decode_table(measured),
        share,
    ]
    page = write_report(
        [out / name for name in MODELS],
        out / "report.html",
        tables=tables,
        title="tokenmix demo: attention and attention-free mixers, side by side",
        lead=[*findings(plan, runs, equal, measured), advised, *busy],
        notes=NOTES,
    )
    say("\n" + "\n\n".join([tables[0].text(), *findings(plan, runs, equal, measured), advised, *busy]))
    say(f"\nTook {time.perf_counter() - began:.0f} s. The page: {page.resolve()}")
    return page


def busy_note() -> list[str]:
    """Return a warning if other work uses the cores that the measurements need.

    It is to be called before the demo's own work counts.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    cores = os.cpu_count() or 1
    if load < 0.5 * cores:
        return []
    return [
        f"The machine was busy with other work at the start (load average {load:.1f} on {cores} cores): "
        "speeds are too low, and not by the same factor for all models."
    ]


def say(text: str) -> None:
    """Print without delay, as the user is watching."""
    print(text, flush=True)


def in_new_process(task: Callable[..., Any], *args: Any) -> Any:
    """Run a task in a new process, so that the memory of one model does not count for another.

    Its threads sleep while they wait: on a machine busy with other work, spinning threads made attention ten times
    slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(task, *args).result()


def trial(plan: Plan) -> dict[str, float]:
    """Estimate how many tokens per second each model will train on."""
    return {name: training_rate(build_model(plan.model(name)), plan.seq_len, batch_size=plan.batch_size, repeats=2) for name in MODELS}


def train_one(plan: Plan, name: str, eval_every: int, out: Path) -> dict[str, Any]:
    """Train one row, then let the model write a sample."""
    done = train(plan.run(name, eval_every), out)
    prompt = b"def "[: max(1, plan.seq_len - plan.sample_bytes)]
    text = sample_run(out, n=min(plan.sample_bytes, plan.seq_len - len(prompt)), prompt=prompt, seed=plan.seed, device="cpu")
    with whole_file(out / "samples" / "after_training.txt") as f:
        f.write(text)
    return done


def measure(plan: Plan) -> Measured:
    """Measure generation after each context, and forward and backward at each length.

    Weights are random, as only time and size are measured.
    """
    found = Measured()
    models = {name: build_model(plan.model(name, max_len=max(plan.contexts) + 256)) for name in MODELS}
    for n in plan.contexts:
        for name, model in models.items():
            found.decode.setdefault(name, {})[n] = decoding(model, n)
    models = {name: build_model(plan.model(name, max_len=max(plan.lengths))) for name in MODELS}
    for n in plan.lengths:
        batch = max(1, max(plan.lengths) // n)
        for name, model in models.items():
            found.rates.setdefault(name, {})[n] = training_rate(model, n, batch_size=batch, repeats=2)
    return found


def advice(plan: Plan, run: Path) -> tuple[str, Table]:
    """Find out whether the attention of the Transformer in ``run`` should be replaced.

    Returns the advice and a table of the model's parts by length. The model is built for longer inputs than it was
    trained on.
    """
    host = load_host(str(run), {"max_len": max(plan.advice)})
    found = advise(host, plan.advice, seconds=plan.advice_seconds)
    return f"Should the attention of this Transformer be replaced? {advice_findings(found)[0]}", shares_table(found)


def equal_tokens(runs: dict[str, Run]) -> tuple[int | None, dict[str, float]]:
    """Return the largest step at which every model was evaluated, and the bits per byte there.

    All models read the same number of tokens per step.
    """
    scores = {name: {e["step"]: e["bits_per_byte"] for e in run.evals if e["split"] == "valid"} for name, run in runs.items()}
    common = set.intersection(*(set(s) for s in scores.values()))
    if not common:
        return None, {}
    return max(common), {name: s[max(common)] for name, s in scores.items()}


def yardsticks(plan: Plan) -> dict[str, float]:
    """Compute the bits per byte of two compressors on the bytes that the models are evaluated on."""
    data = bytes(open_corpus("stdlib").split("valid")[: plan.eval_bytes].tolist())
    return {"gzip -9": 8 * len(gzip.compress(data, 9)) / len(data), "xz -9e": 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)}


def shown_contexts(plan: Plan) -> tuple[int, int]:
    """Return the two contexts of the main table: 1,024 if measured, and the longest."""
    low = 1024 if 1024 in plan.contexts else min(plan.contexts)
    return low, max(plan.contexts)


def main_table(plan: Plan, runs: dict[str, Run], equal: tuple[int | None, dict[str, float]], measured: Measured) -> Table:
    """Return the table with one row per model, then the compressors."""
    low, high = shown_contexts(plan)
    tokens = "at equal tokens" if equal[0] is None else f"after {equal[0] * plan.batch_size * plan.seq_len:,} tokens"
    columns = ["model", "parameters", f"bits/byte after {plan.seconds:.0f} s", f"bits/byte {tokens}", "tokens trained", "tokens/s", "peak memory"]
    columns += [f"state at {low:,}", f"state at {high:,}", f"ms/token at {low:,}", f"ms/token at {high:,}"]
    rows = []
    for name, run in runs.items():
        peak, decode = run.largest("peak_mib"), measured.decode[name]
        row = [name, number(run.env.get("parameters"), 0), number(run.last_eval("valid")), number(equal[1].get(name))]
        row += [number(run.largest("tokens"), 0), number(run.median("tokens_per_s"), 0), size(None if peak is None else peak * 2**20)]
        row += [size(decode[n].state_bytes) for n in (low, high)] + [number(decode[n].ms_per_token, 2) for n in (low, high)]
        rows.append(row)
    rows += [[name, "n/a", number(bits), number(bits), *["n/a"] * (len(columns) - 4)] for name, bits in yardsticks(plan).items()]
    notes = [
        f"Bits per byte: on the first {plan.eval_bytes:,} bytes of the validation split, each scored once; " + "the compressors read only these bytes.",
        "Peak memory: the whole process while training, Python and torch included. State and ms/token: " + "one sequence, random weights.",
    ]
    return Table("At equal wall-clock and at equal tokens", columns, rows, notes)


def by_length(title: str, values: dict[str, dict[int, float]], digits: int) -> Table:
    """Return a table with one row per model and one column per length."""
    lengths = list(next(iter(values.values())))
    return Table(title, ["model", *(f"{n:,}" for n in lengths)], [[name, *(number(v[n], digits) for n in lengths)] for name, v in values.items()])


def decode_table(measured: Measured) -> Table:
    """Return the table of milliseconds per generated token by context."""
    return by_length("Generation by context, milliseconds per token", decode_times(measured), 2)


def decode_times(measured: Measured) -> dict[str, dict[int, float]]:
    """Return the milliseconds per generated token, by model and context."""
    return {name: {n: d.ms_per_token for n, d in by.items()} for name, by in measured.decode.items()}


def findings(plan: Plan, runs: dict[str, Run], equal: tuple[int | None, dict[str, float]], measured: Measured) -> list[str]:
    """State in sentences what follows from the numbers."""
    env = next(iter(runs.values())).env
    setting = (
        f"{len(runs)} byte language models, {plan.layers} layers of {plan.dim} features, each trained for "
        f"{plan.seconds:.0f} s on sequences of "
        f"{plan.seq_len:,} bytes of the Python standard library's sources, on {env.get('cpu', 'an unnamed CPU')} with "
        f"{env.get('threads', '?')} threads. "
        "They are tiny and barely trained: read this as a check that everything works and as a measurement of speed, "
        "not as a verdict on quality."
    )
    quality = ["Bits per byte at equal wall-clock, best first: " + f"{ranking({name: r.last_eval('valid') for name, r in runs.items()})}."]
    if equal[0] is not None:
        quality.append(f"At equal tokens: {ranking(equal[1])}.")
    rivals = [name for name in runs if name != "attention"]
    ms = decode_times(measured)
    training = "; ".join(stops_winning("attention", measured.rates["attention"], name, measured.rates[name], lower=False) for name in rivals)
    decode = "; ".join(stops_winning("attention", ms["attention"], name, ms[name], lower=True) for name in rivals)
    return [setting, " ".join(quality), f"Training speed by sequence length: {training}.", f"Time per generated token by context: {decode}."]


def ranking(scores: dict[str, float | None] | dict[str, float]) -> str:
    """List names from the fewest bits per byte to the most."""
    known = sorted((s, name) for name, s in scores.items() if s is not None)
    return ", then ".join(f"{name} ({s:.3f})" for s, name in known)


NOTES = (
    "Equal tokens: the largest step at which all models were evaluated; " + "as the learning rate is constant, a longer run is the same up to there.",
    "One seed. Another seed would change bits per byte by up to about 0.02.",
    "A result counts as a win at a length when it is better by more than 5 percent.",
)
