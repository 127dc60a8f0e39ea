"""The verbs of the command line. Each takes its options and returns a function that does the work; heavy imports wait until then."""

from __future__ import annotations

import json as _json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..errors import MixerError
from .run_verbs import Work, convert, evaluate, export_hf, export_onnx, pictures, report, resume, sample, train


def show(*, cost: int | None = None, dim: int = 512, json: bool = False) -> Work:
    """Mixers with their tier, paper, cost, what they can do and their options; recipes and their rows.

    Args:
        cost: a length T: instead, the FLOPs, parameters and bytes of every mixer over T tokens, from its own formulas.
        dim: features, for --cost.
        json: print as JSON.
    """

    def work() -> int:
        from .catalogue import catalogue, catalogue_text

        if cost is not None:
            from .costs import costs, costs_text

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
        from .catalogue import diagnose, diagnosis_text

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
        from ..testing.cli import main_check

        try:
            parsed = _json.loads(options)
        except ValueError as why:
            raise MixerError(f"--options is not JSON ({why}), got {options!r}; write it like '{{\"window\": 8}}'.") from None
        if not isinstance(parsed, dict):
            raise MixerError(f"--options must be a JSON object, got {options!r}.")
        return main_check(target, parsed, json)

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
        from ..bench.command import bench as run

        options: dict[str, Any] = {"ops": ops, "backends": backends, "level": level, "lengths": lengths, "passes": passes, "batch": batch, "dim": dim}
        options |= {"heads": heads, "layers": layers, "dtype": dtype, "device": device, "causal": causal, "threads": threads, "budget": budget}
        options |= {"longest_call": longest_call, "baseline": baseline, "against": against, "base": base, "cuda_graph": cuda_graph, "fast_linear": fast_linear}
        return run(**options, json_to=json, plot_to=plot)

    return work


def advise(
    model: Positional[str],
    /,
    *,
    lengths: str | None = None,
    candidates: str | None = None,
    batch: int = 1,
    seconds: float = 20.0,
    worth: float = 1.25,
    options: str = "{}",
    device: str = "auto",
    data: Path | None = None,
    minutes: float = 3.0,
    last: int | None = None,
    write: Path | None = None,
    out: Path | None = None,
    json: bool = False,
) -> Work:
    """Should this model's attention be replaced? Its measured share of time and memory, what replacing it gains at most, and what other mixers gain.

    Args:
        model: a run directory, a folder of transformers, a name of `tokenmix list`, a class or model type of transformers (BertModel, bert), a model of timm,
            or package:factory, a callable that returns a model, or (model, inputs) with inputs(length, batch).
        lengths: tokens, or sides of images, such as 256,1k,4k,16k; default some that the model takes.
        candidates: measure these mixers inside the model too: auto, or such as hydra,aft_local:window=32.
        batch: rows.
        seconds: for the shares, about; candidates take up to three times as long. Lengths that would not fit are left out.
        worth: how many times as fast the model must be able to become for replacing to pay.
        options: fields of the model's config, or arguments of the factory, as JSON; the weights are then new, which is all the same to its speed.
        device: auto, cpu or cuda.
        data: a text: replace attention by the fastest candidate, distil on this text, print the loss before and after, write the model.
        minutes: of distillation.
        last: replace only the last so many attention modules.
        write: the folder for the converted model; the distillation's run goes beside it.
        out: an HTML page with the curves.
        json: print everything as JSON.
    """

    def work() -> int:
        from ..advise.command import advise_command

        given: dict[str, Any] = {"lengths": lengths, "batch": batch, "seconds": seconds, "worth": worth, "candidates": candidates, "options": options}
        given |= {"data": data, "minutes": minutes, "last": last, "write": write, "out": out}
        return advise_command(model, **given, device=device, json_to_stdout=json)

    return work


def new_mixer(name: Positional[str], /) -> Work:
    """Write the skeleton of a new mixer into a checkout of this library: module, functional form, reference, page, rows and test case.

    It keeps the contract as it is written; `make quick M=NAME` shows that. Then replace its mathematics.

    Args:
        name: a lower-case identifier, such as gated_mean.
    """

    def work() -> int:
        from ..testing.new_mixer import new_mixer

        root = Path.cwd()
        for file in new_mixer(name, root):
            print(f"wrote {file.relative_to(root)}")
        print(f"next: make quick M={name}; then write the paper's equation into the reference, and go on from there (docs/adding-a-mixer.md)")
        return 0

    return work


VERBS: dict[str, Callable[..., Any]] = {
    "doctor": doctor,
    "list": show,
    "check": check,
    "new-mixer": new_mixer,
    "advise": advise,
    "train": train,
    "resume": resume,
    "eval": evaluate,
    "sample": sample,
    "report": report,
    "convert": convert,
    "export-hf": export_hf,
    "export-onnx": export_onnx,
    "pictures": pictures,
    "bench": bench,
}
