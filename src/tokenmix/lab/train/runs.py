"""Existing runs: load the model, evaluate it, sample from it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...models.model import load_weights
from ...models.saved import pick_step, read_weights_of
from ...system.config import dotted_fields, nearest
from ...system.machine import pick_device
from ...types import Options, Record
from ..data.metrics_csv import append_csv
from ..data.subwords import END, MASK, SPECIAL, START
from .config import RunConfig, check_seed, check_unchanged
from .document_task import DocumentDataConfig, likely_subwords
from .flow_task import draw_images, in_turn
from .label_task import LabelDataConfig, join_texts, read_labels
from .own import run_model
from .rundir import RunDir
from .subword_task import read_tokenizer
from .task import Task
from .tasks import open_task, task_of

DRAW = "density models and diffusion transformers do (`tokenmix train image_diffusion`)"


def load_run(path: Path | str, *, step: int | str = "last", device: str = "cpu") -> tuple[nn.Module, RunConfig]:
    """Load the model of a run at a checkpoint, in eval mode, and the run's config.

    If the run averages its weights, the average is loaded.

    Args:
        step: a number, "last" or "best" (on the validation split).
    """
    run = RunDir.open(path)
    config = run.config()
    tensors, progress = read_weights_of(run.path, pick_step(run.path, step), averaged=bool(config.optim.ema))
    check_unchanged(config, progress.get("config"), run.path / "config.json")
    with torch.random.fork_rng():
        model = run_model(config, run.path)
    load_weights(model, tensors, run.path)
    return model.to(pick_device(device)).eval(), config


def evaluate_run(
    path: Path | str,
    *,
    split: str = "test",
    step: int | str = "last",
    device: str = "auto",
    record: bool = True,
    data: str | None = None,
    **options: Any,
) -> Any:
    """Score a run on one split of its data and, unless ``record`` is False, append the result to its metrics.jsonl.

    If the run has a metrics.csv, the result is added there too. A warning says so if metrics.jsonl cannot be written.

    Args:
        data: other data than that of training, a named set or a path; its score is not recorded.
        options: stride, seq_len, max_bytes and by_context for text, beams, length_penalty, max_texts and written for
            pairs of texts, image_size and max_images for images, lengths, samples and passes for synthetic sequences;
            None: the default, which is the whole split.
    """
    run = RunDir.open(path)
    model, config = load_run(path, step=step, device=device)
    if data is not None:
        config, record = _on_data(config, data), False
    task = open_task(config, run.path)
    if data is None:
        task.check_same(run.env())
    options = {name: value for name, value in options.items() if value is not None}
    _check_options(task, path, options)
    record = record and _can_record(run)
    result = task.evaluate(model, split, **options)
    if record:
        line = eval_line(split, pick_step(run.path, step), result)
        try:
            run.append(line)
            if config.train.csv:
                append_csv(run.csv, run.metrics, line)
        except OSError as why:  # the result is worth more than its record
            warnings.warn(
                f"{run.metrics} cannot be written to ({why.strerror or why}); the result is not added to it.",
                stacklevel=2,
            )
    return result


def _on_data(config: RunConfig, given: str) -> RunConfig:
    """Return the config of a run with other data, which must fit its model."""
    task = task_of(config)
    found = config.override(task.fields_of(config.data, given))
    matched = dotted_fields(task.match(found).to_json()["model"]) if task.matches else {}
    own = dotted_fields(found.to_json()["model"])
    changed = [f"model.{n} is {own[n]}, not {matched[n]}" for n in matched if matched[n] != own.get(n)]
    if changed:
        raise MixerError(f"eval: {given} does not fit the model of this run: {'; '.join(changed)}.")
    return found


def _check_options(task: Task, path: Path | str, options: Options) -> None:
    """Refuse options that the kind of run does not have, and counts below 1, which would score all but the last."""
    wrong = [name for name in options if name not in task.options]
    if wrong:
        raise MixerError(f"eval: the score of {path} takes {', '.join(task.options)}; leave out {', '.join(wrong)}.")
    for name in ("max_bytes", "max_images", "max_texts", "samples", "passes"):
        if options.get(name, 1) < 1:
            raise MixerError(f"eval: {name} must be at least 1, got {options[name]}.")


def _can_record(run: RunDir) -> bool:
    """Return whether metrics.jsonl can be written to, before time is spent on the evaluation."""
    try:
        run.metrics.open("ab").close()
    except OSError as why:
        warnings.warn(
            f"{run.metrics} cannot be written to ({why.strerror or why}); the result will not be added to it.",
            stacklevel=3,
        )
        return False
    return True


def eval_line(split: str, step: int, result: Any) -> Record:
    """Return an evaluation as a line of metrics.jsonl."""
    fields = {name: value for name, value in asdict(result).items() if value is not None and value != ()}
    if "by_context" in fields:
        fields["by_context"] = {f"{least}-{most}": bits for least, most, bits in fields["by_context"]}
    return {"kind": "eval", "split": split, "step": step, **fields, "seconds": round(result.seconds, 3)}


def sample_run(
    path: Path | str,
    *,
    n: int | None = None,
    prompt: bytes = b"\n",
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    step: int | str = "last",
    device: str = "auto",
) -> bytes:
    """Continue a prompt with a run's language model and return prompt and continuation as bytes.

    A model of sequences of characters (``data.CHARACTER_TASKS``) writes an answer to a prompt such as ``b"12+345="``,
    up to its ";".

    Args:
        n: bytes to generate; default 500, or as many as fit into the model's length. For characters: the most there may
            be, by default twice the prompt and 8 more.
    """
    check_seed(seed, "sample: seed")
    model, config = load_run(path, step=step, device=device)
    task = task_of(config)
    if task.writes != "write":
        raise MixerError(
            f"{path} holds a model of kind {config.model.kind!r}, which generates no text; a language model does."
        )
    sampling: Options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    return task.continue_text(config, Path(path), model, prompt, n, **sampling)


def translate_run(
    path: Path | str,
    text: str,
    *,
    beams: int = 1,
    step: int | str = "last",
    device: str = "auto",
    **sampling: Any,
) -> str:
    """Return what a run's encoder-decoder writes for a source, such as its translation.

    One that was trained to fill in spans takes a text with sentinels, "Thank you <extra_0> to your party", and writes
    each sentinel and what it holds for the span.

    Args:
        beams: targets that are followed at once.
        sampling: temperature, top_k, top_p and seed of ``Seq2Seq.generate``.

    Raises:
        MixerError: if the source is empty, or longer than the sources of training.
    """
    check_seed(sampling.get("seed"), "sample: seed")
    model, config = load_run(path, step=step, device=device)
    task = task_of(config)
    if task.writes != "translate":
        raise MixerError(f"{path} holds a model of kind {config.model.kind!r}, not an encoder-decoder.")
    return task.translate_text(config, Path(path), model, text, beams=beams, **sampling)


def fill_run(
    path: Path | str, text: str, *, n: int = 5, step: int | str = "last", device: str = "auto"
) -> list[list[tuple[str, float]]]:
    """Return what a run's encoder holds most likely at each ``<mask>`` of a text.

    Args:
        n: guesses for each mask.

    Returns:
        For each mask the n most likely subwords and their probabilities, the most likely first.

    Raises:
        MixerError: if the run holds no masked model, and for a text without a mask or longer than those of training.
    """
    model, config = load_run(path, step=step, device=device)
    if task_of(config).writes != "fill":
        raise MixerError(f"{path} holds no encoder of masked texts, which `tokenmix train masked` makes.")
    if n < 1:
        raise MixerError(f"sample: the number of guesses must be at least 1, got {n}.")
    words, most = read_tokenizer(Path(path)), cast(DocumentDataConfig, config.data).max_tokens
    tokens = [START, *words.encode_marked(text), END]
    places = [i for i, token in enumerate(tokens) if token == MASK]
    if not places or len(tokens) > most:
        raise MixerError(
            f"sample: the text must have a {SPECIAL[MASK]} to fill in, and at most {most - 2} "
            + f"subwords, got {len(tokens) - 2} and {len(places)} masks; give it with --prompt."
        )
    return likely_subwords(model, torch.tensor([tokens]), torch.tensor(places), words, n)


@torch.no_grad()
def classify_run(
    path: Path | str, *texts: str, step: int | str = "last", device: str = "auto"
) -> list[tuple[str, float]]:
    """Return the probability of each label of a text, or of a pair of texts, by a run's classifier.

    Raises:
        MixerError: if the run holds no classifier of texts, and for another number of texts than it was trained on.
    """
    model, config = load_run(path, step=step, device=device)
    if task_of(config).writes != "classify":
        raise MixerError(f"{path} holds no classifier of texts, which `tokenmix train sentences` makes.")
    found = read_labels(Path(path))
    if len(texts) != found.texts or not all(text.strip() for text in texts):
        raise MixerError(
            f"sample: the classifier of {path} reads {found.texts} text{'s' * (found.texts > 1)}, got "
            + f"{len([text for text in texts if text.strip()])}; give --prompt, with a tab between two texts."
        )
    words = read_tokenizer(Path(path))
    tokens = join_texts([words.encode(text.strip()) for text in texts], cast(LabelDataConfig, config.data).max_tokens)
    shares = model(torch.tensor([tokens], device=next(model.parameters()).device))[0].float().softmax(-1).tolist()
    return sorted(zip(found.labels, shares, strict=True), key=lambda each: -each[1])


def draw_run(
    path: Path | str,
    *,
    n: int = 16,
    step: int | str = "last",
    device: str = "auto",
    complete: bool = False,
    **sampling: Any,
) -> Tensor:
    """Sample images from a run's density model, uint8 (n, C, H, W).

    Args:
        complete: sample only the lower halves of images of the test split; these images follow the completed ones.
    """
    model, config = load_run(path, step=step, device=device)
    writes = task_of(config).writes
    if writes != "draw":
        says = "generate_run samples" if writes == "generate" else f"generates no images; {DRAW}"
        raise MixerError(f"{path} holds a model of kind {config.model.kind!r}, which {says}.")
    _check_drawing(n, sampling.get("seed"))
    density: Any = model
    if not complete:
        return density.sample(n, **sampling).cpu()
    task: Any = open_task(config, Path(path))
    real = task.pictures("test", n)
    return torch.cat([density.complete(real, real.shape[2] // 2, **sampling).cpu(), real])


def generate_run(
    path: Path | str,
    *,
    n: int = 16,
    classes: Sequence[str] | None = None,
    step: int | str = "last",
    device: str = "auto",
    **sampling: Any,
) -> tuple[Tensor, list[str]]:
    """Sample images from a run's diffusion transformer, uint8 (n, C, H, W), with the names of their classes.

    Args:
        classes: names of classes to draw in turn; None: all. A model that is told no class has no names.
        sampling: steps, solver, guidance and seed of ``DiT.sample``.

    Raises:
        MixerError: if the run holds no diffusion transformer, for classes that it does not have, and for options out of
            range.
    """
    model, config = load_run(path, step=step, device=device)
    if task_of(config).writes != "generate":
        raise MixerError(f"{path} holds a model of kind {config.model.kind!r}, which is no diffusion transformer.")
    _check_drawing(n, sampling.get("seed"))
    known: list[str] = RunDir.open(path).env().get("class_names", [])
    _check_classes(path, known, classes or [])
    names = list(dict.fromkeys(classes or known))
    drawn = draw_images(model, config.data, in_turn([known.index(name) for name in names], n), n, **sampling)
    return drawn, [names[i % len(names)] for i in range(n) if names]


def _check_classes(path: Path | str, known: list[str], asked: Sequence[str]) -> None:
    """Refuse classes that a run's diffusion transformer does not have."""
    if asked and not known:
        raise MixerError(f"sample: the model of {path} is told no class (model.classes=0); leave the classes out.")
    for name in asked:
        if name not in known:
            raise MixerError(f"sample: the model of {path} has no class {name!r}; {nearest(name, known)}.")


def _check_drawing(n: int, seed: int | None) -> None:
    """Refuse a number of images below 1, and a seed that generators do not accept."""
    check_seed(seed, "sample: seed")
    if n < 1:
        raise MixerError(f"sample: the number of images must be positive, got {n}.")
