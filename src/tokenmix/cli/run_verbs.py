"""The verbs around a run: train, resume, eval, sample, report, convert. Each takes its options and returns a function that does the work."""

from __future__ import annotations

import json as _json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from ..errors import MixerError
from .summaries import print_summary, say

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
    skip_bad_files: bool = False,
    json: bool = False,
) -> WorkWith:
    """Train a recipe into a new run directory. Any field of the config can be set: --model.dim 64 --train.steps 100.

    Args:
        recipe: see `tokenmix list`.
        out: the run directory to make.
        row: which experiment of the recipe.
        size: smoke: a CPU, about a minute; gpu: one GPU; paper: as printed.
        data: a corpus (stdlib, enwik8), a set of images (digits, cifar10 ...), or the path of a text, of images, or of a local copy of what the recipe
            expects; number of classes, channels and size of images follow.
        skip_bad_files: images: leave out files that are no images, with a warning.
        json: print the summary as JSON.
    """

    def work(changes: dict[str, Any]) -> int:
        from ..recipes import find_recipe
        from ..train import match_data
        from ..train import train as run

        config = find_recipe(recipe).config(row, size)
        if skip_bad_files:
            config = config.override({"data.skip_bad_files": True})
        if data is not None:
            config = config.override(data_fields(config.data.to_json(), data))
            if config.data.kind == "images":  # is opened here already, with the options it will be trained with
                config = match_data(config.override({name: value for name, value in changes.items() if name.startswith("data.")}))
        print_summary(run(config.override(changes), out), json)
        return 0

    return work


def data_fields(data: dict[str, Any], given: str) -> dict[str, Any]:
    """The config fields meant by ``--data``: a name, or a path, which where a named set to download is expected must hold that set."""
    from ..data import CORPORA, IMAGE_SETS

    if given in (CORPORA if data["kind"] == "text" else IMAGE_SETS):
        return {"data.source": given}
    found = Path(given).expanduser()
    path = str(found.resolve()) if found.exists() else given  # what does not exist is refused by the name it was given
    expected = data["source"] == "enwik8" if data["kind"] == "text" else data["source"] in IMAGE_SETS and data["source"] != "digits"
    return {"data.path": path} if expected else {"data.source": path}


def resume(dir: Positional[Path], /, *, from_step: Annotated[int | None, arg(name="from")] = None, json: bool = False) -> WorkWith:
    """Go on with a run after any stop. Fields under train. can be changed: --train.steps 2000.

    Args:
        dir: the run directory.
        from_step: an earlier checkpoint; what lies after it is done again.
        json: print the summary as JSON.
    """

    def work(changes: dict[str, Any]) -> int:
        from ..train import resume as run

        print_summary(run(dir, from_step=from_step, changes=changes), json)
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
    max_images: int | None = None,
    image_size: int | None = None,
    step: Step = "last",
    device: str = "auto",
    json: bool = False,
) -> Work:
    """Score a run on one split of its data (bits per byte, accuracy, bits per dimension), added to its metrics.

    Args:
        dir: the run directory.
        split: train, valid or test.
        stride: text: how far the windows move; default half their length.
        seq_len: text: length of the windows; default that of training.
        max_bytes: text: only the first so many bytes.
        max_images: images: only the first so many.
        image_size: images: another size than that of training, where the model takes it.
        device: auto, cpu or cuda.
        json: print the result as JSON.
    """

    def work() -> int:
        from dataclasses import asdict

        from ..train import evaluate_run

        options: dict[str, Any] = {"stride": stride, "seq_len": seq_len, "max_bytes": max_bytes, "max_images": max_images, "image_size": image_size}
        result = evaluate_run(dir, split=split, step=step, device=device, **options)
        say(_json.dumps({"split": split, **asdict(result)}) if json else f"{split}: {result.text()}")
        return 0

    return work


def sample(
    dir: Positional[Path],
    /,
    *,
    bytes: int | None = None,
    prompt: str = "\n",
    images: int = 16,
    complete: bool = False,
    out: Path | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    step: Step = "last",
    device: str = "auto",
    json: bool = False,
) -> Work:
    """Let a run's model write, or draw.

    Args:
        dir: the run directory.
        bytes: text: how many to write; default 500, or what fits into the model's length.
        prompt: text: what to continue.
        images: density models: how many to draw.
        complete: density models: draw only the lower halves of test images, and show the real ones below.
        out: density models: the PNG to write; default sample.png in the run directory.
        temperature: 0 takes the most likely value each time; default 0.8 for text, 1 for images.
        top_k: choose among the k most likely values.
        top_p: choose among the fewest values that hold this probability.
        seed: makes the choice repeatable.
        device: auto, cpu or cuda.
        json: print prompt and continuation, or the picture's path, as JSON.
    """

    def work() -> int:
        from ..train.rundir import RunDir

        options: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "seed": seed, "step": step, "device": device}
        if RunDir.open(dir).config().model.kind == "image_density":
            return _draw(dir, out or dir / "sample.png", images, complete, {**options, "temperature": 1.0 if temperature is None else temperature}, json)
        return _write(dir, bytes, prompt, {**options, "temperature": 0.8 if temperature is None else temperature}, json)

    return work


def _write(dir: Path, n: int | None, prompt: str, options: dict[str, Any], json: bool) -> int:
    from ..train import sample_run

    start = os.fsencode(prompt)  # the bytes that were typed, be they text or not
    text = sample_run(dir, n=n, prompt=start, **options)
    if json:
        say(_json.dumps({"prompt": prompt, "text": text[len(start) :].decode(errors="replace")}))
    else:
        say(text.decode(errors="replace"))
    return 0


def _draw(dir: Path, out: Path, n: int, complete: bool, options: dict[str, Any], json: bool) -> int:
    from ..system.files import check_writable
    from ..train import draw_run
    from ..train.image_tasks import write_grid

    check_writable(out)
    write_grid(out, draw_run(dir, n=n, complete=complete, **options), columns=n if complete else 8)
    say(_json.dumps({"images": n, "file": str(out)}) if json else out)
    return 0


def report(dirs: Positional[list[Path]], /, *, out: Path | None = None) -> Work:
    """Write one self-contained HTML page about one or more runs.

    Args:
        dirs: run directories.
        out: the page; default report.html in the first run directory.
    """

    def work() -> int:
        from ..system.files import check_writable
        from ..train.rundir import RunDir

        if not dirs:
            raise MixerError("report: give at least one run directory.")
        for path in dirs:
            RunDir.open(path)
        try:
            from ..report import write_report
        except ImportError as why:
            raise MixerError(f"report needs the extra 'plot' ({why}): pip install 'tokenmix[plot]'.") from None
        page = out or dirs[0] / "report.html"
        check_writable(page)
        say(write_report(dirs, page))
        return 0

    return work


def pictures(dir: Positional[Path], images: Positional[list[Path]], /, *, out: Path, dark: bool = False, json: bool = False) -> Work:
    """Draw what a vision model looks at in image files: filters, keys, attention by offset, focus, memories, token norms, each as PNG.

    Args:
        dir: a run directory, or a folder that `tokenmix convert` wrote.
        images: image files.
        out: the folder for the pictures.
        dark: on a dark ground.
        json: print the paths as JSON.
    """

    def work() -> int:
        from ..report import draw_pictures
        from ..train import load_model
        from ..train.rundir import RunDir

        if not images:
            raise MixerError("pictures: give at least one image file.")
        model, _ = load_model(dir)
        data: Any = RunDir.open(dir).config().data if (dir / "checkpoints").is_dir() else None
        written = draw_pictures(model, images, out, mean=getattr(data, "mean", None), std=getattr(data, "std", None), theme="dark" if dark else "light")
        say(_json.dumps([str(p) for p in written]) if json else "\n".join(str(p) for p in written))
        return 0

    return work


def convert(
    source: Positional[str],
    target: Positional[str],
    /,
    *,
    out: Path,
    resize: bool = False,
    classes: int | None = None,
    last: int | None = None,
    every: int | None = None,
    init: Literal["copy", "random"] = "copy",
    seed: int = 0,
    json: bool = False,
) -> Work:
    """Carry the weights of a softmax model into one with other mixers: of a ViT into ours, or within a model of transformers or timm, layer by layer.

    A run starts from a converted ViT with `--train.init DIR`; a converted host is loaded with `tokenmix.hosts.load_converted(DIR)`.

    Args:
        source: a checkpoint of a ViT (.safetensors, .pth, .bin), a run directory, timm:NAME, or a folder of transformers (hf:PATH).
        target: of a ViT of ours: its name (see `tokenmix list`), or mixer specs as JSON: one, or a list of one per layer. Of a host: one spec, or JSON that
            gives patterns of its attention modules a spec each, '{"encoder.layer.*": {"name": "hydra"}}'; a ViT of timm or transformers needs patterns.
        out: the directory to write: config.json, model.safetensors, report.json.
        resize: a ViT of ours: allow another image size; learned positions are interpolated.
        classes: a ViT of ours: of a new head.
        last: a host: only the last so many of the modules that a pattern matches.
        every: a host: only every so-manyth of them, from the back.
        init: a host: random: carry nothing into the mixers.
        seed: of what is new.
        json: print the report as JSON.
    """

    def work() -> int:
        from ..hosts.surgery.save_load import convert_any
        from ..train.config import check_seed

        check_seed(seed, "convert: seed")
        found, load = convert_any(
            source, target, out, ours={"resize": resize, "classes": classes}, host={"last": last, "every": every, "init": init}, seed=seed
        )
        say(_json.dumps(found.to_json(), indent=1) if json else f"{found}\n{load}")
        return 0

    return work


def export_hf(run: Positional[Path], out: Positional[Path], /, *, step: Step = "last") -> Work:
    """Turn a run (a language model or a ViT) into a Hugging Face folder with a model card.

    Args:
        run: the run directory.
        out: the folder to write, for AutoModelForCausalLM or AutoModelForImageClassification.
    """

    def work() -> int:
        from ..hosts.huggingface import export_run

        say(export_run(run, out, step=step))
        return 0

    return work


def export_onnx(
    source: Positional[str],
    out: Positional[Path],
    /,
    *,
    decode: bool = False,
    length: int | None = None,
    fixed: bool = False,
    key_mask: bool = False,
    chunk: int = 1,
    opset: int | None = None,
    seed: int = 0,
    json: bool = False,
) -> Work:
    """Write a model as an ONNX file, after it was run by ONNX Runtime and compared with torch.

    Args:
        source: a run directory, a folder that `tokenmix convert` wrote, or a model by name with fresh weights (see `tokenmix list`).
        out: the file to write.
        decode: the next tokens with a state that goes in and out, instead of whole inputs.
        length: the longest input it must take; default the model's longest.
        fixed: that length alone.
        key_mask: take a mask of the tokens beside them.
        chunk: tokens of one decode step.
        opset: of the ONNX operators, 18 or above.
        seed: of fresh weights.
        json: print the report as JSON.
    """

    def work() -> int:
        import torch

        from ..export import export_onnx as export
        from ..models import MODELS, build_model
        from ..train import load_model
        from ..train.config import check_seed

        check_seed(seed, "export-onnx: seed")
        if source not in MODELS and not Path(source).is_dir():
            raise MixerError(f"export-onnx: {source!r} is neither a directory nor the name of a model; `tokenmix list` shows the names.")
        if source in MODELS:
            torch.manual_seed(seed)
        model = build_model(source) if source in MODELS else load_model(source)[0]
        report = export(model, out, decode=decode, length=length, fixed=fixed, key_mask=key_mask, chunk=chunk, opset=opset)
        say(_json.dumps(report.to_json(), indent=1) if json else report)
        return 0

    return work
