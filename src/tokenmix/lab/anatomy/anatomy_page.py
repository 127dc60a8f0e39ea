"""The anatomy of a model as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...system.files import whole_file
from ...system.text import Table
from ..report.figures import Picture, check_drawing
from ..report.page import environment
from . import pictures as draw
from .measure import Anatomy
from .outliers import StepNorms
from .probes import ByDepth, Classified, Compared, Probes

NONE = "none"
HOW = {
    "softmax": "the weights of softmax attention, exact",
    "values": "the size of the exact weight of each value, the mean over heads or channels",
    "jacobian": "the norm of the derivative of each output with regard to each input, since the layer is no sum over "
    "values",
}


class Section(NamedTuple):
    """A section of the page."""

    heading: str
    text: list[str]
    tables: list[Table]
    pictures: list[Picture]


def write_page(anatomy: Anatomy, out: Path | str, tell: Callable[[str], None] = lambda line: None) -> Path:
    """Write the page: what was found, each measure with its pictures, and how it was measured."""
    check_drawing()
    tell("look tokens: drawing")
    page = (
        environment("tokenmix.lab.anatomy")
        .get_template("anatomy.html")
        .render(
            title=f"Anatomy of {anatomy.subject.name}",
            lead=lead(anatomy),
            tables=[],
            parts=parts(anatomy),
            facts=_facts(anatomy),
            notes=_notes(anatomy),
        )
    )
    out = Path(out)
    with whole_file(out) as f:
        f.write(page.encode("utf-8", "backslashreplace"))
    return out


def lead(anatomy: Anatomy) -> list[str]:
    """Return what was found, in sentences."""
    outliers, subject, last = anatomy.outliers, anatomy.subject, anatomy.reading.norms.patches[-1]
    count, share = int(outliers.mask.sum()), f"{100 * outliers.share:.2f} %"
    before = {0: "no token", 1: "one token"}.get(len(subject.prefix), f"{len(subject.prefix)} tokens")
    lines = [
        f"{subject.name} is {subject.kind}, {len(subject.blocks)} layers, with {before} before "
        f"{subject.grid[0]} x {subject.grid[1]} patches. It read {len(anatomy.images.pixels)} images "
        f"({anatomy.images.source}).",
        f"{count:,} of {outliers.mask.numel():,} patches ({share}) are outliers: after the last layer their norm is "
        f"above {outliers.cutoff:.3g}, {outliers.rule}. The median norm is {float(last.median()):.3g}, the largest "
        f"{float(last.max()):.3g}.",
    ]
    if not count:
        lines.append("No patch stands out, so there is nothing to compare; --top 2 compares the 2 % of the largest.")
    return lines + [f"Note: {note}." for note in subject.notes]


def parts(anatomy: Anatomy) -> list[Section]:
    """Return the sections in order."""
    alike = anatomy.redundancy
    return [
        Section(
            "Norms",
            [
                "An outlier is a patch whose token has a norm far above the others' after the last layer. In the paper "
                "they appear in the middle layers of large models that were trained for long, in uniform regions.",
            ],
            _step_tables(anatomy.by_step),
            draw.norm_pictures(anatomy),
        ),
        Section(
            "Were outliers redundant?",
            [
                "Right after the patch embedding, the paper's outliers resemble their neighbours more than other "
                "patches do: what they held could be dropped.",
                f"Mean similarity of outliers: {_number(alike.outliers)}; of other patches: {_number(alike.others)}.",
            ],
            [],
            draw.redundancy_pictures(anatomy),
        ),
        Section(
            "What single tokens tell",
            [
                "Linear probes read one token. In the paper, outliers tell less of their position and their pixels "
                "than other patches, and more of the class of the image: they hold what belongs to all of it.",
            ],
            [*_probe_tables(anatomy.probes), *_class_tables(anatomy.classified), *_depth_tables(anatomy.by_depth)],
            [],
        ),
        Section(
            "Where tokens look",
            [
                f"Weights of the last layer: {HOW[anatomy.how]}. Maps with outliers have single bright patches; with "
                "registers they are smooth. Moran's I is 1 for a smooth map, about 0 for noise.",
            ],
            [],
            draw.look_pictures(anatomy),
        ),
        Section(
            "Objects without labels",
            [
                f"LOST on the {anatomy.features} of the {'output' if anatomy.features == 'tokens' else 'last layer'}: "
                "the patch that resembles the fewest others is the seed, and the object grows from it. With outliers, "
                "seeds fall on them.",
                *_whole_image_warning(anatomy),
            ],
            [],
            draw.object_pictures(anatomy),
        ),
    ]


def _whole_image_warning(anatomy: Anatomy) -> list[str]:
    """Return a warning where objects are whole images."""
    whole = sum(bool(found.mask.all()) for found in anatomy.objects)
    if not whole:
        return []
    return [
        f"In {whole} of {anatomy.n_drawn} images the object is the whole image, since its patches' products are hardly "
        "ever negative. A negative --shift, or other --features, tells patches apart.",
    ]


def summary(anatomy: Anatomy) -> str:
    """Return the numbers for a terminal."""
    tables = [*_step_tables(anatomy.by_step), *_probe_tables(anatomy.probes), *_class_tables(anatomy.classified)]
    tables += _depth_tables(anatomy.by_depth)
    return "\n".join([*lead(anatomy), *(table.text() for table in tables)])


def _probe_tables(probes: Probes | str) -> list[Table]:
    title = "Probes of patches, on the half of the images that was not fitted"
    if isinstance(probes, str):
        return [Table(title, ["probe"], [], [f"Not measured: {probes}."])]
    rows = [
        ["position found, %", *_pair(probes.position, 100)],
        ["distance from the true position, patches", *_pair(probes.distance)],
        ["L2 error of the pixels", *_pair(probes.pixels)],
        ["the same for the mean patch", *_pair(probes.mean_pixels)],
    ]
    return [
        Table(
            title,
            ["probe", "outliers", "other patches"],
            rows,
            [f"Ridge regression. Guessing finds {100 * probes.chance:.2g} % of the positions."],
        )
    ]


def _class_tables(found: Classified | str) -> list[Table]:
    title = "Class of the image from one token"
    if isinstance(found, str):
        return [Table(title, ["token"], [], [f"Not measured: {found}."])]
    rows = [[name, f"{100 * share:.1f}"] for name, share in found.accuracy.items()]
    note = f"Logistic regression, fitted on {found.fitted} images, scored on {found.scored} others; "
    note += f"the most frequent class has {100 * found.chance:.1f} %."
    return [Table(title, ["token", "right, %"], rows, [note])]


def _depth_tables(found: ByDepth | str) -> list[Table]:
    if isinstance(found, str):  # the table above says why
        return []
    columns = [f"{kind}, {how}" for kind in found.linear for how in ("linear", "k-NN")]
    layers = zip(*(by[kind] for kind in found.linear for by in (found.linear, found.nearest)), strict=True)
    rows = [
        ["before" if i == 0 else str(i - 1), *(f"{100 * share:.1f}" for share in row)] for i, row in enumerate(layers)
    ]
    note = (
        f"Right, %, on {found.scored} images; logistic regression and nearest neighbours among {found.fitted} others."
    )
    return [Table("Class of the image by depth", ["after layer", *columns], rows, [note])]


def _step_tables(found: dict[int, StepNorms]) -> list[Table]:
    rows = [
        [f"{step:,}", _number(then.median[-1]), _number(then.largest[-1]), f"{100 * then.outliers:.2f}"]
        for step, then in found.items()
    ]
    title, columns = "Norms by step of training", ["step", "median", "largest", "outliers, %"]
    note = "Of patches after the last layer; outliers by the default cutoff at each step."
    return [Table(title, columns, rows, [note])] if found else []


def _pair(found: Compared, times: float = 1.0) -> list[str]:
    return [_number(None if value is None else times * value) for value in found]


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}"


def _facts(anatomy: Anatomy) -> Table:
    subject = anatomy.subject
    rows = [
        ["model", f"{subject.name}: {subject.kind}"],
        ["images", f"{anatomy.images.source}; {subject.image_size[0]} x {subject.image_size[1]} pixels"],
        ["mean and deviation of the channels", f"{_list(subject.mean)}; {_list(subject.std)}"],
        ["tokens before the patches", ", ".join(subject.prefix) or NONE],
        ["cutoff", f"{anatomy.outliers.cutoff:.4g}: {anatomy.outliers.rule}"],
        ["objects", f"LOST on {anatomy.features}"],
    ]
    return Table("Setting", ["fact", "value"], rows)


def _notes(anatomy: Anatomy) -> list[str]:
    return [
        "Norms are those of the residual stream, before the model's last norm; probes read the tokens after it.",
        "A ridge on the half of the images that was fitted; the other half is scored. Outliers are part of both.",
        "What holds for one model and one set of images need not hold for another.",
    ]


def _list(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
