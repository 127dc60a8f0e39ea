"""The last picture that each run drew, with what its rows show."""

from __future__ import annotations

import base64
from pathlib import Path

from ..data.masks import COLOURS
from .figures import Picture
from .runs import FLOW, MASKS, Run

DENSITY_ROWS = (
    "top: drawn by the model; middle: lower halves drawn below real upper halves; "
    "bottom: the real images of the validation split"
)
FLOW_DRAWN, FEW = "drawn by the model from noise", 16
MASK_ROWS = "top: the first images of the validation split; middle: their masks; bottom: what the model predicts"


def drawn_pictures(runs: list[Run]) -> list[tuple[str, list[tuple[str, list[Picture]]]]]:
    """Return the last picture of each run that drew any, under the headings of their kinds."""
    found: dict[str, list[tuple[str, list[Picture]]]] = {}
    for run in runs:
        if run.drawn:
            heading = "Predicted masks" if run.metric is MASKS else "Images drawn"
            found.setdefault(heading, []).append((run.name, [drawn_picture(run, run.drawn[-1])]))
    return list(found.items())


def drawn_picture(run: Run, file: Path) -> Picture:
    """Return a picture that a run drew: images of a density or diffusion model, or masks of a segmentation model."""
    uri = "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode("ascii")
    what, whose = _rows(run), "and masks" if run.metric is MASKS else "drawn"
    alt = f"Images {whose} by the model of {run.name}; {what}."
    return Picture(uri, uri, alt=alt, caption=f"{file.name}; {what}.{_legend(run) if run.metric is MASKS else ''}")


def _rows(run: Run) -> str:
    """Return what the rows of a run's pictures show, or the columns of a diffusion transformer's, in words."""
    if run.metric is not FLOW:
        return MASK_ROWS if run.metric is MASKS else DENSITY_ROWS
    names = run.env.get("class_names")
    if not isinstance(names, list) or not names:
        return FLOW_DRAWN
    return f"{FLOW_DRAWN}, one of each class in turn: {', '.join(map(str, names[:FEW]))}{', ...' * (len(names) > FEW)}"


def _legend(run: Run) -> str:
    """Return the colours of the first classes in words."""
    images = run.env.get("images")
    names = images.get("names", []) if isinstance(images, dict) else []
    said = [f"{name} {colour}" for name, (colour, _) in zip(names, COLOURS, strict=False)]
    if not said:
        return ""
    more = f", {len(names) - len(said)} more classes in other colours" if len(names) > len(said) else ""
    return f" Colours: {', '.join(said)}{more}; white: ignored."
