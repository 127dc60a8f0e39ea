"""One page from run directories: curves, tables, samples, position biases, the machine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import MixerError
from ...models import MAE, PointClassifier, PointSegmenter, ViT
from ...system.files import whole_file
from ...system.text import Table, named_apart
from ...types import Options
from .biases import bias_pictures
from .cautions import cautions, question
from .clouds import cloud_pictures
from .differences import differences_table, not_comparable
from .drawn import drawn_pictures
from .figures import Picture, check_drawing, loss_curves
from .lengths import length_pictures
from .mixtures import mixture_pictures, mixture_table, mixtures
from .pictures import attention_pictures
from .runs import TEXT, Run, load_model, read_run
from .tables import facts_table, iou_table, noise_table, summary_table
from .vision import Section, run_images, vision_section

if TYPE_CHECKING:
    from jinja2 import Environment


SAMPLE_CHARS = 1200
IMAGES = 10
"""The most images of a validation split that a page shows, one of each class if there are no more classes."""
SMALL = 1_000_000
"""Parameters of models whose pictures are folded away: they say little, and take most of the page."""
SECTIONS = (
    "attention",
    "mixtures",
    "mixture_table",
    "biases",
    "vision",
    "clouds",
    "drawn",
    "samples",
    "samples_first",
    "fold",
)
"""Parts of a page that only runs have."""
SENTENCE = b"When the wind fell, the boats that had left the harbour turned back to it."
NOTES = (
    "Loss curves show training batches; only the tables show evaluations on data the model was not trained on.",
    "Speeds and memory hold for this machine and this load.",
    "A small model trained for minutes says little about a large one trained for days.",
)


def write_report(
    run_dirs: Iterable[Path | str],
    out: Path | str,
    *,
    tables: list[Table] | None = None,
    title: str | None = None,
    lead: Iterable[str] = (),
    notes: Iterable[str] = (),
    pictures: Sequence[Picture] = (),
    samples_first: str | None = None,
    refresh: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
    compare: bool = True,
    caution: bool = True,
) -> Path:
    """Write one self-contained HTML page about the runs.

    Args:
        run_dirs: run directories; only read.
        out: the file to write.
        tables: further tables, placed before those of the runs.
        title: of the page; None: the question that it answers.
        lead: paragraphs at the top.
        notes: further footnotes.
        pictures: the first one opens the page, the others come before the loss curves.
        samples_first: a sentence on how the models wrote their samples, which then stand above the lead.
        refresh: seconds after which a browser loads the page again; None: never.
        tell: called with a line of progress before each part.
        compare: open with the fields in which the configs of the runs differ, and warn if steps, tokens or data differ.
        caution: say what scores of one seed and of few examples leave open.

    Returns:
        The path written.
    """
    check_drawing()
    tell("report: reading the runs")
    runs = [read_run(d) for d in run_dirs]
    runs = [replace(run, name=name) for run, name in zip(runs, named_apart([r.path for r in runs]), strict=True)]
    if not runs:
        raise MixerError("report: give at least one run directory.")
    parts = [table for table in (iou_table(runs), noise_table(runs)) if table is not None]
    warning, differences = (not_comparable(runs), differences_table(runs)) if compare else (None, None)
    if warning:
        tell("")  # the warning must not stand behind a line of progress
        warnings.warn(warning, stacklevel=2)
    tell("report: drawing the curves")
    curves = loss_curves(runs)
    looks = [_draw_model(run, f"report: {run.name} ({i} of {len(runs)})", tell) for i, run in enumerate(runs, 1)]
    return write_page(
        out,
        title=question(runs) if title is None else title,
        lead=[*lead, *([warning] if warning else []), *(cautions(runs) if caution else [])],
        fold=all(run.env.get("parameters", 0) < SMALL for run in runs),
        first=pictures[:1],
        tables=[*(tables or []), *([differences] if differences else []), summary_table(runs), *parts],
        curves=[("Loss", [*pictures[1:], *curves]), ("Beyond the sizes of training", length_pictures(runs))],
        attention=[
            (r.name, look["attention"])
            for r, look in zip(runs, looks, strict=True)
            if look.get("attention") is not None
        ],
        mixtures=[(r.name, look["mixtures"]) for r, look in zip(runs, looks, strict=True) if look.get("mixtures")],
        mixture_table=mixture_table([(r.name, look.get("mixed", [])) for r, look in zip(runs, looks, strict=True)]),
        biases=[(r.name, look["biases"]) for r, look in zip(runs, looks, strict=True) if look.get("biases")],
        vision=[(r.name, look["vision"]) for r, look in zip(runs, looks, strict=True) if look.get("vision")],
        clouds=[(r.name, look["clouds"]) for r, look in zip(runs, looks, strict=True) if look.get("clouds")],
        drawn=drawn_pictures(runs),
        samples=[(r.name, name, text[:SAMPLE_CHARS], len(text)) for r in runs for name, text in r.samples[-1:]],
        facts=facts_table(runs),
        notes=[*NOTES, *notes],
        samples_first=samples_first,
        refresh=refresh,
    )


def write_page(
    out: Path | str,
    *,
    title: str,
    tables: Iterable[Table],
    facts: Table,
    lead: Iterable[str] = (),
    first: Iterable[Picture] = (),
    curves: Iterable[tuple[str, list[Picture]]] = (),
    notes: Iterable[str] = (),
    refresh: int | None = None,
    **sections: object,
) -> Path:
    """Write one self-contained HTML page in the style of a report.

    Args:
        out: the file to write.
        tables: tables below the lead.
        facts: how it was measured: machine, data, plan.
        lead: paragraphs at the top.
        first: pictures right below the title.
        curves: pictures under headings; a heading without pictures is left out.
        notes: footnotes.
        refresh: seconds after which a browser loads the page again; None: never.
        sections: what else ``template.html`` shows, by name.

    Returns:
        The path written.
    """
    check_drawing()
    page = (
        environment()
        .get_template("template.html")
        .render(
            title=title,
            lead=list(lead),
            first=list(first),
            tables=list(tables),
            curves=[(heading, pictures) for heading, pictures in curves if pictures],
            facts=facts,
            notes=list(notes),
            refresh=refresh,
            **{name: sections.get(name, []) for name in SECTIONS},
        )
    )
    out = Path(out)
    with whole_file(out) as f:
        f.write(page.encode("utf-8", "backslashreplace"))  # file names need not be valid text
    return out


def environment(*packages: str) -> Environment:
    """Return the templates of pages: ours, and those of further packages of the library, which may extend
    ``base.html``.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, select_autoescape

    loader = ChoiceLoader([PackageLoader(name, ".") for name in ("tokenmix.lab.report", *packages)])
    return Environment(
        loader=loader,
        autoescape=select_autoescape(("html",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _draw_model(run: Run, who: str, tell: Callable[[str], None]) -> Options:
    """Draw what a run's model attends, its position biases, what it looks at in images, or its clouds, by section."""
    tell(f"{who}: loading the model")
    model = load_model(run)
    if model is None:
        return {}
    mixed = mixtures(model)
    found: Options = {"mixed": mixed, "mixtures": mixture_pictures(run.name, mixed)}
    if isinstance(model, (ViT, MAE)):
        return {**found, "vision": _vision(run, model, who, tell)}
    if isinstance(model, (PointClassifier, PointSegmenter)):
        tell(f"{who}: drawing clouds")
        return {**found, "clouds": cloud_pictures(run, model)}
    if run.metric is TEXT and model.config.vocab == 256:
        found["attention"] = attention_pictures(run.name, model, _text(run), lambda what: tell(f"{who}: {what}"))
    found["biases"] = bias_pictures(run.name, model, lambda what: tell(f"{who}: {what}"))
    return found


def _vision(run: Run, model: ViT | MAE, who: str, tell: Callable[[str], None]) -> list[Section]:
    """Draw what a ViT looks at in images of its validation split; nothing where these can no longer be loaded."""
    tell(f"{who}: loading images")
    try:
        images, names = run_images(run, model, IMAGES)
    except MixerError:
        return []
    return vision_section(model, images, names, lambda what: tell(f"{who}: {what}"))


def _text(run: Run) -> bytes:
    """Return the text the model reads in the pictures: the start of its last sample, or a sentence."""
    return run.samples[-1][1].encode() if run.samples and run.samples[-1][1] else SENTENCE
