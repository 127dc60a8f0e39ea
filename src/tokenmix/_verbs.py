"""The verbs of the command line. Each takes its options and returns a function that does the work; heavy imports wait until then."""

from __future__ import annotations

import json as _json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from .errors import MixerError

Work = Callable[[], int]
WorkWith = Callable[[dict[str, Any]], int]
Step = Annotated[str, arg(help="checkpoint to use: a step, last or best")]


def train(
    recipe: Positional[str],
    /,
    *,
    out: Path,
    row: str | None = None,
    size: Literal["smoke", "gpu", "paper"] = "smoke",
    data: str | None = None,
    json: bool = False,
) -> WorkWith:
    """Train a recipe into a new run directory. Any field of the config can be set: --model.dim 64 --train.steps 100.

    Args:
        recipe: see `tokenmix list`.
        out: the run directory to make.
        row: which experiment of the recipe.
        size: smoke: a CPU, about a minute; gpu: one GPU; paper: as printed.
        data: a corpus (stdlib, enwik8) or the path of a text file or folder; for the recipe aft_enwik8, a local copy of enwik8.
        json: print the summary as JSON.
    """

    def work(changes: dict[str, Any]) -> int:
        from .recipes import find_recipe
        from .train import train as run

        config = find_recipe(recipe).config(row, size)
        if data is not None:
            config = config.override(data_fields(config.data.source, data))
        _print_summary(run(config.override(changes), out), json)
        return 0

    return work


def data_fields(source: str, given: str) -> dict[str, Any]:
    """The config fields meant by ``--data``: a name, or a path, which where enwik8 is expected must hold enwik8."""
    from .data import CORPORA

    if given in CORPORA:
        return {"data.source": given}
    path = str(Path(given).expanduser().resolve())
    return {"data.path": path} if source == "enwik8" else {"data.source": path}


def resume(dir: Positional[Path], /, *, from_step: Annotated[int | None, arg(name="from")] = None, json: bool = False) -> WorkWith:
    """Go on with a run after any stop. Fields under train. can be changed: --train.steps 2000.

    Args:
        dir: the run directory.
        from_step: an earlier checkpoint; what lies after it is done again.
        json: print the summary as JSON.
    """

    def work(changes: dict[str, Any]) -> int:
        from .train import resume as run

        _print_summary(run(dir, from_step=from_step, changes=changes), json)
        return 0

    return work


def evaluate(
    dir: Positional[Path],
    /,
    *,
    split: str = "test",
    stride: int | None = None,
    seq_len: int | None = None,
    max_bytes: int | None = None,
    step: Step = "last",
    device: str = "auto",
    json: bool = False,
) -> Work:
    """Bits per byte of a run on one split of its corpus, added to its metrics.

    Args:
        dir: the run directory.
        split: train, valid or test.
        stride: how far the windows move; default half their length.
        seq_len: length of the windows; default that of training.
        max_bytes: only the first so many bytes.
        device: auto, cpu or cuda.
        json: print the result as JSON.
    """

    def work() -> int:
        from dataclasses import asdict

        from .train import evaluate_run

        result = evaluate_run(dir, split=split, stride=stride, seq_len=seq_len, max_bytes=max_bytes, step=step, device=device)
        text = f"{split}: {result.bits_per_byte:.4f} bits/byte over {result.bytes:,} bytes, windows of {result.seq_len} moved by {result.stride}"
        print(_json.dumps({"split": split, **asdict(result)}) if json else text)
        return 0

    return work


def sample(
    dir: Positional[Path],
    /,
    *,
    bytes: int = 500,
    prompt: str = "\n",
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    step: Step = "last",
    device: str = "auto",
    json: bool = False,
) -> Work:
    """Let a run's model write.

    Args:
        dir: the run directory.
        bytes: how many to write.
        prompt: what to continue.
        temperature: 0 takes the most likely byte each time.
        top_k: choose among the k most likely bytes.
        top_p: choose among the fewest bytes that hold this probability.
        seed: makes the choice repeatable.
        device: auto, cpu or cuda.
        json: print prompt and continuation as JSON.
    """

    def work() -> int:
        from .train import sample_run

        options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed, "step": step, "device": device}
        text = sample_run(dir, n=bytes, prompt=prompt.encode(), **options)
        if json:
            print(_json.dumps({"prompt": prompt, "text": text[len(prompt.encode()) :].decode(errors="replace")}))
        else:
            sys.stdout.write(text.decode(errors="replace") + "\n")
        return 0

    return work


def show(*, cost: int | None = None, dim: int = 512, json: bool = False) -> Work:
    """Mixers with their tier, paper, cost, what they can do and their options; recipes and their rows.

    Args:
        cost: a length T: instead, the FLOPs, parameters and bytes of every mixer over T tokens, from its own formulas.
        dim: features, for --cost.
        json: print as JSON.
    """

    def work() -> int:
        from ._info import catalogue, catalogue_text

        if cost is not None:
            from ._costs import costs, costs_text

            table = costs(cost, dim)
            print(_json.dumps(table, indent=1) if json else costs_text(table, cost, dim))
            return 0
        found = catalogue()
        print(_json.dumps(found, indent=1) if json else catalogue_text(found))
        return 0

    return work


def doctor(*, json: bool = False) -> Work:
    """What this installation can do, and what to fix; exit code 1 where something is broken.

    Args:
        json: print as JSON.
    """

    def work() -> int:
        from ._info import diagnose, diagnosis_text

        found = diagnose()
        print(_json.dumps(found, indent=1) if json else diagnosis_text(found))
        return 1 if found["broken"] else 0

    return work


def check(target: Positional[str], /, *, options: str = "{}", json: bool = False) -> Work:
    """Run the contract suite on a layer of your own, or on one of ours.

    Args:
        target: package:Class, or the name of a mixer.
        options: the layer's options, as JSON.
        json: print the verdicts as JSON.
    """

    def work() -> int:
        from .testing.cli import main_check

        try:
            parsed = _json.loads(options)
        except ValueError as why:
            raise MixerError(f"--options is not JSON ({why}), got {options!r}; write it like '{{\"window\": 8}}'.") from None
        if not isinstance(parsed, dict):
            raise MixerError(f"--options must be a JSON object, got {options!r}.")
        return main_check(target, parsed, json)

    return work


def report(dirs: Positional[list[Path]], /, *, out: Path | None = None) -> Work:
    """Write one self-contained HTML page about one or more runs.

    Args:
        dirs: run directories.
        out: the page; default report.html in the first run directory.
    """

    def work() -> int:
        from .train.rundir import RunDir

        if not dirs:
            raise MixerError("report: give at least one run directory.")
        for path in dirs:
            RunDir.open(path)
        try:
            from .report import write_report
        except ImportError as why:
            raise MixerError(f"report needs the extra 'plot' ({why}): pip install 'tokenmix[plot]'.") from None
        print(write_report(dirs, out or dirs[0] / "report.html"))
        return 0

    return work


def bench(
    *,
    ops: str | None = None,
    backends: str = "auto",
    level: Literal["op", "layer", "decode", "model"] = "op",
    lengths: str | None = None,
    passes: Annotated[Literal["forward", "backward", "both"], arg(name="pass")] = "both",
    batch: int | None = None,
    dim: int = 512,
    heads: int = 8,
    layers: int = 2,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    device: str = "auto",
    causal: bool = True,
    threads: int | None = None,
    budget: float = 60.0,
    longest_call: float = 10.0,
    baseline: str | None = None,
    against: Literal["peers"] | None = None,
    base: str | None = None,
    cuda_graph: bool = False,
    fast_linear: bool = False,
    json: str | None = None,
    plot: Path | None = None,
) -> Work:
    """Speed and memory of mixers beside softmax attention and the machine's limits; nothing is timed that is wrong on adversarial inputs.

    Args:
        ops: what to measure, such as aft_simple,aft_local:window=32,hydra:causal=false,attention@eager; see `tokenmix list`.
        backends: measure each on these: auto, eager, cpu, triton, separated by commas.
        level: op: on q, k and v; layer: with projections; decode: one more token; model: a training step of a language model.
        lengths: tokens, separated by commas, or grids such as 14x14; for decode, tokens of context.
        passes: forward, backward (forward and backward together), or both of these.
        batch: rows; default 4, for decode and model 1.
        layers: of the model.
        device: auto, cpu or cuda.
        causal: where there is a causal form.
        threads: of torch; default as torch has it.
        budget: seconds of timing, after the gates and the limits.
        longest_call: seconds; a call that takes longer is not timed.
        baseline: one more subject to give ratios to.
        against: peers: the public implementations that are installed, at level layer.
        base: a git revision of tokenmix to time in turns with this one.
        cuda_graph: on CUDA, replay calls as graphs.
        fast_linear: let oneDNN compute float32 products where that is faster and as exact; what was found is printed.
        json: a file for everything measured, or - for stdout.
        plot: a PNG of time against length.
    """

    def work() -> int:
        from .bench.command import bench as run

        options: dict[str, Any] = {"ops": ops, "backends": backends, "level": level, "lengths": lengths, "passes": passes, "batch": batch, "dim": dim}
        options |= {"heads": heads, "layers": layers, "dtype": dtype, "device": device, "causal": causal, "threads": threads, "budget": budget}
        options |= {"longest_call": longest_call, "baseline": baseline, "against": against, "base": base, "cuda_graph": cuda_graph, "fast_linear": fast_linear}
        return run(**options, json_to=json, plot_to=plot)

    return work


def _print_summary(summary: dict[str, Any], json: bool) -> None:
    if json:
        print(_json.dumps(summary))
        return
    bits = summary["valid_bits_per_byte"]
    print(
        f"{summary['run']}: {summary['step']} steps, {summary['tokens']:,} tokens in {summary['seconds']:.1f} s ({summary['tokens_per_s']:,.0f} tokens/s), "
        f"{'not evaluated' if bits is None else f'{bits:.4f} bits/byte on valid'}, peak {summary['peak_mib']:,.0f} MiB"
    )


VERBS: dict[str, Callable[..., Any]] = {
    "doctor": doctor,
    "list": show,
    "check": check,
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "sample": sample,
    "report": report,
    "bench": bench,
}
