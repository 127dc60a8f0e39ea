"""The verbs of a run: train, resume, eval and report; ``sample`` has a file of its own."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from ...errors import MixerError
from ...system.machine import is_first_rank
from ...system.modules import typed_names
from ...types import Options, Record
from . import output
from .arguments import given_options, parse_object
from .host_folders import evaluate_host, is_host_folder
from .output import progress, say

if TYPE_CHECKING:
    from ..train import RunConfig


@dataclass(frozen=True)
class Train:
    """Train a recipe into a new run directory. Any field of the config can be set: --model.dim 64 --train.steps 100."""

    recipe: Positional[Annotated[str, arg(metavar="RECIPE")]] = ""
    """Name of the recipe; `tokenmix list` shows all. Or a Python file of your own with a RECIPE, and with the task that
    it trains. Left out with --from."""

    out: Path | None = None
    """Run directory to create. Default: runs/ and the recipe, the row and the size, as far as they were given."""

    from_run: Annotated[Path | None, arg(name="from", metavar="RUN")] = None
    """Begin a new run with the settings of another and its last weights: `tokenmix train --from RUN --optim.lr 1e-4
    --out NEW`. Optimiser, schedule and steps begin anew."""

    row: str | None = None
    """Experiment of the recipe to train; by default the one that `tokenmix list` marks as default."""

    size: Literal["smoke", "gpu", "paper"] = "smoke"
    """Scale of the experiment. smoke: about a minute on a CPU; gpu: one GPU; paper: as published."""

    shell: Literal["paper", "modern"] | None = None
    """Blocks around the mixers: as in the papers, or as trained today. Default: those of the recipe.
    With rates that a sweep has tuned for this recipe and size in this shell, where there are any."""

    data: str | None = None
    """Data to train on: a corpus (stdlib, enwik8), an image set (digits, cifar10, ...), images with masks (scenes),
    pairs of texts (grammar, docstrings), labelled texts (docstring_match), a synthetic task (recall, copy), a set of
    point clouds (solids, objects), or a path.
    A path leads to a text, to documents, to pairs of texts, to labelled texts, to images, to a folder of images/ and
    masks/, to point clouds, or to a local copy of the set that the recipe expects.
    The number of classes, the channels and the image size follow from the data. Default: the recipe's data."""

    skip_bad_files: bool = False
    """Images: skip unreadable files with a warning instead of stopping."""

    csv: bool = False
    """Keep the metrics as a table too, in metrics.csv. The same as --train.csv true."""

    tensorboard: bool = False
    """Write metrics and samples for TensorBoard too. The same as --train.tensorboard true."""

    json: bool = False
    """Print the summary as JSON."""

    def run(self, changes: Options) -> int:
        """Train, with ``changes`` to the fields of the config, and print a summary."""
        from ..recipes import describe_changes, find_recipe, import_recipe
        from ..train import match_data, train
        from ..train.tasks import task_of

        changes = log_fields(self) | changes
        if self.from_run is not None:
            config, about = self._fork(), f"from: the settings and the last weights of {self.from_run}."
        elif not self.recipe:
            raise MixerError("train: name a recipe, such as text (`tokenmix list` shows all), or give --from RUN.")
        else:
            import_recipe(self.recipe)
            recipe = find_recipe(self.recipe)
            config = recipe.config(self.row, self.size, self.shell)
            smaller = describe_changes(recipe.reduced_amounts(config))
            about = f"recipe: {config.row} at size {self.size} is smaller than in the paper: {smaller}." * bool(smaller)
        if self.skip_bad_files:
            config = config.override({"data.skip_bad_files": True})
        if self.data is not None:
            config = config.override(task_of(config).fields_of(config.data, self.data))
            if task_of(config).matches:  # opened with the options of training
                data_changes = {name: value for name, value in changes.items() if name.startswith("data.")}
                config = match_data(config.override(data_changes))
        config = config.override(changes)
        print_summary(train(config, self.out or self._folder(), about=about), self.json)
        return 0

    def _fork(self) -> RunConfig:
        """Return the config of the run to begin from, with its weights."""
        from ..train.rundir import RunDir

        given = given_options(self, {f.name for f in fields(self)} - {"row", "size", "shell"})
        given += ["RECIPE"] * bool(self.recipe)
        if given or self.out is None:
            wrong = f"leave out {', '.join(given)}" if given else "give the new run a folder, --out"
            raise MixerError(f"train: --from takes the settings of {self.from_run}; {wrong}.")
        config = RunDir.open(self.from_run or "").config()
        return config.override({"train.init": str((self.from_run or Path()).resolve())})

    def _folder(self) -> Path:
        """Return runs/RECIPE_ROW_SIZE without what is the default; a restart of the same command finds it again."""
        parts = [Path(self.recipe).stem, self.row, self.size if self.size != "smoke" else None]
        return Path("runs", "_".join(part for part in parts if part))


def log_fields(verb: Train | Resume) -> Options:
    """Return the config fields that the flags of a verb set; without a flag, they stay as they are."""
    return {f"train.{name}": True for name in ("csv", "tensorboard") if getattr(verb, name)}


@dataclass(frozen=True)
class Resume:
    """Continue an interrupted or finished run. Fields under train. can be changed: --train.steps 2000."""

    dir: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Run directory."""

    from_step: Annotated[int | None, arg(name="from")] = None
    """Step of an earlier checkpoint to continue from; later steps are repeated. Default: the last checkpoint."""

    allow_code: bool = False
    """Import the Python files that the run names: its own mixers, task, loss and the like. They run with your rights,
    so give it for a run that you trust. Without it, only the modules in TOKENMIX_MODULES are imported."""

    csv: bool = False
    """Keep the metrics as a table too, in metrics.csv. The same as --train.csv true."""

    tensorboard: bool = False
    """Write metrics and samples for TensorBoard too. The same as --train.tensorboard true."""

    json: bool = False
    """Print the summary as JSON."""

    def run(self, changes: Options) -> int:
        """Continue the run, with ``changes`` to the fields of the config, and print a summary."""
        from ..train import resume

        changes = log_fields(self) | changes
        with typed_names() if self.allow_code else nullcontext():
            print_summary(resume(self.dir, from_step=self.from_step, changes=changes), self.json)
        return 0


@dataclass(frozen=True)
class Evaluate:
    """Score a run on one split of its data and add the result to its metrics.

    The score is in bits per byte for text, bits per dimension for density models, the
    squared error of the velocity for diffusion transformers, cross-entropy with BLEU and chrF or
    ROUGE for pairs of texts, cross-entropy for documents, accuracy for classifiers and synthetic sequences, and mean
    intersection over union (mIoU) for images with masks; for a host's folder it is the perplexity of --data, in tokens
    of the folder's tokenizer.
    """

    dir: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Run directory, or a host's folder: one that `tokenmix convert` wrote, or one of transformers."""

    data: str | None = None
    """Other data than that of training, given as for `tokenmix train`; the score is not added to the run's metrics.
    Host's folder: text file to score."""

    split: str = "test"
    """Split to score: train, valid or test."""

    stride: int | None = None
    """Text: bytes from one window to the next. Default: half a window."""

    seq_len: int | None = None
    """Text: length of a window in bytes. Default: that of training."""

    max_bytes: int | None = None
    """Text: score only the first N bytes. Default: all."""

    by_context: bool = False
    """Text: also print the score by the bytes of context: 1, 2 to 3, 4 to 7 ... Windows then do not overlap."""

    scaling: str | None = None
    """Text: rule for rotary positions in windows longer than those of training: linear, ntk, yarn or llama3, whose
    factor is then the ratio of the lengths, or a whole rule as JSON."""

    resize: bool = False
    """Text: stretch learned positions and all other parameters per position to --seq-len first."""

    beams: int | None = None
    """Pairs of texts: targets that are followed at once while the model writes; 0: it writes nothing. Default: 5."""

    length_penalty: float | None = None
    """Pairs of texts: exponent of the length by which a target's log-probability is divided. Default: 1."""

    max_texts: int | None = None
    """Pairs of texts, documents and labelled texts: score only the first N of them. Default: all."""

    written: Path | None = None
    """Pairs of texts: file for what the model writes, one line per pair. Default: it is not kept."""

    max_images: int | None = None
    """Images: score only the first N images. Default: all."""

    image_size: int | None = None
    """Images: side in pixels, where the model takes other sizes than that of training. Default: that of training."""

    lengths: tuple[int, ...] | None = None
    """Synthetic sequences: sizes to score, also beyond those of training; where a task has two, every pair of them."""

    samples: int | None = None
    """Synthetic sequences: number of them for each of --lengths. Default: 100."""

    passes: int | None = None
    """Synthetic sequences: passes through the blocks of a looped model. Default: those of training."""

    step: str = "last"
    """Checkpoint to use: a step, last or best."""

    device: str = "auto"
    """Device to run on: auto, cpu or cuda."""

    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        """Score the run and print the result."""
        from ..train import evaluate_run

        if is_host_folder(self.dir):
            return evaluate_host(self)
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("dir", "json")}
        for name in ("by_context", "resize"):
            given[name] = given[name] or None
        if (self.scaling or "").startswith("{"):
            given["scaling"] = parse_object(self.scaling or "", '{"name": "ntk", "factor": 4}', "eval: ", "scaling")
        result = evaluate_run(self.dir, **given)
        say(json.dumps({"split": self.split, **asdict(result)}) if self.json else f"{self.split}: {result.text()}")
        return 0


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page about runs, or a table of all their metrics; --watch shows them live."""

    dirs: Positional[Annotated[list[Path], arg(metavar="RUN [RUN ...]")]]
    """Run directories. With --watch also folders that contain some, in which new ones are found as they appear."""

    out: Path | None = None
    """HTML file to write. Default: report.html in the first run directory, or none with --csv or --watch.
    With --watch it is written again when something has changed; a browser reloads it by itself."""

    csv: Path | None = None
    """CSV file to write: one row for each line of metrics of the runs, which the column run tells apart."""

    watch: bool = False
    """Show the curves and the state of runs in the terminal as they go on. Ctrl-C ends it; the runs go on."""

    x: Literal["step", "tokens", "seconds"] | None = None
    """--watch: what the curves are drawn against; tokens are images where a model is trained on images, seconds those
    of training. Default: step."""

    metric: str | None = None
    """--watch: what is drawn: loss, score (on the validation split), or a field of metrics.jsonl, such as lr or
    tokens_per_s. Default: loss."""

    every: float | None = None
    """--watch: seconds from one look at the runs to the next. Default: 2."""

    once: bool = False
    """--watch: print what there is once and end. Always so where the output is no terminal."""

    def run(self) -> int:
        """Write the page, the table or both, and print their paths; or watch the runs."""
        if not self.dirs:
            raise MixerError("report: give at least one run directory.")
        if not self.watch and (wrong := given_options(self, {"dirs", "out", "csv"})):
            raise MixerError(f"report: {', '.join(wrong)} is for --watch, which was not given.")
        if self.watch and self.csv is not None:
            raise MixerError("report: --csv and --watch exclude each other; give one of them.")
        if self.watch:
            from .watch import Watcher

            every = 2.0 if self.every is None else self.every
            return Watcher(self.dirs, self.x or "step", self.metric or "loss", every, self.once, self.out).run()
        return self._write()

    def _write(self) -> int:
        from ...system.files import check_writable
        from ..train.rundir import RunDir

        for path in self.dirs:
            RunDir.open(path)
        if self.csv is not None:
            from ..report.runs import write_metrics

            say(write_metrics(self.dirs, self.csv))
            if self.out is None:
                return 0
        try:
            from ..report import write_report
        except ImportError as why:
            raise MixerError(f"report needs the extra 'plot' ({why}): pip install 'tokenmix[plot]'.") from None
        page = self.out or self.dirs[0] / "report.html"
        check_writable(page)
        tell = progress(output.REPEAT)
        try:
            written = write_report(self.dirs, page, tell=tell)
        finally:
            tell("")
        say(written)
        return 0


def print_summary(summary: Record, as_json: bool) -> None:
    """Print the summary of a training run, once if several processes share it."""
    if not is_first_rank():
        return
    if as_json:
        say(json.dumps(summary))
        return
    unit = next(name.removesuffix("_per_s") for name in summary if name.endswith("_per_s"))
    metric = next(name for name in summary if name.startswith("valid_"))
    took = f"{summary[unit]:,} {unit} in {summary['seconds']:.1f} s ({summary[f'{unit}_per_s']:,.0f} {unit}/s)"
    score = score_text(metric.removeprefix("valid_"), summary[metric])
    say(f"{summary['run']}: {summary['step']} steps, {took}, {score}, peak {summary['peak_mib']:,.0f} MiB")


def score_text(metric: str, value: float | None) -> str:
    """Return the last score on the validation split in words."""
    if value is None:
        return "not evaluated"
    texts = {
        "bits_per_byte": f"{value:.4f} bits/byte",
        "bits_per_dim": f"{value:.4f} bits/dim",
        "top1": f"{100 * value:.2f} % top-1",
        "cross_entropy": f"cross-entropy {value:.4f}",
        "accuracy": f"{100 * value:.2f} % right",
        "instance_miou": f"instance mIoU {100 * value:.2f} %",
        "pixel_loss": f"pixel loss {value:.4f}",
        "flow_loss": f"flow loss {value:.4f}",
        "miou": f"{100 * value:.2f} % mIoU",
    }
    return f"{texts.get(metric, f'{metric} {value:.4f}'.replace('_', ' '))} on valid"
