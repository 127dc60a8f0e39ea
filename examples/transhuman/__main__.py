"""A body seen from the front, drawn from all around: ``python -m examples.transhuman COMMAND``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from tokenmix import MixerError

from . import pictures
from .evaluation import KINDS, held_out, score_floors, score_model
from .model import PAPER, PAPER_PARAMETERS, TransHumanConfig, count_parameters
from .scenes import Scene
from .training import TrainSettings, load, train

ROWS: dict[str, TransHumanConfig] = {
    "attention": TransHumanConfig({"name": "attention", "heads": 3}),
    "aft_simple": TransHumanConfig({"name": "aft_simple"}),
    "aft_full": TransHumanConfig({"name": "aft_full"}),
    "hydra": TransHumanConfig({"name": "hydra"}),
    "external": TransHumanConfig({"name": "external"}),
    "linear": TransHumanConfig({"name": "linear", "heads": 3}),
    "convolution": TransHumanConfig({"name": "attention", "heads": 3}, kind="convolution"),
    "voxels": TransHumanConfig({"name": "attention", "heads": 3}, kind="voxels"),
    "appearance": TransHumanConfig({"name": "attention", "heads": 3}, kind="none"),
    "clusters_32": TransHumanConfig({"name": "attention", "heads": 3}, clusters=32),
    "clusters_300": TransHumanConfig({"name": "attention", "heads": 3}, clusters=300),
    "one_field": TransHumanConfig({"name": "attention", "heads": 3}, neighbours=1),
}
"""Rows: a mixer of the tokens, a baseline, or an ablation. AFT-forget is none: clusters have no order to forget in."""


def score(out: Path, scenes: int) -> dict[str, dict[str, float]]:
    """Score a run on each kind of scenes, and write the scores into its folder."""
    model, settings = load(out)
    found = {}
    for kind in KINDS:
        given = held_out(kind, settings, scenes)
        rows = {"model": score_model(model, given), **score_floors(given)}
        for name, row in rows.items():
            found[f"{kind}, {name}"] = asdict(row)
            print(
                f"{kind:9} {name:13} PSNR {row.psnr:5.2f}  SSIM {row.ssim:.3f}  colour of unseen vertices wrong by "
                f"{row.unseen:.3f}, of seen {row.seen:.3f}"
            )
    (out / "scores.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def pick(out: Path, number: int) -> Scene:
    """Return a scene with a new person, as the run sees it."""
    _, settings = load(out)
    return held_out("identity", settings, number + 1)[number]


def render(out: Path, number: int) -> None:
    """Write the pictures of a run."""
    model, settings = load(out)
    scene = pick(out, number)
    for name, image in pictures.comparison(model, scene).items():
        pictures.save(image, out / f"{name}.png")
    pictures.turntable(model, scene, out / "turntable.webp")
    print(f"pictures of {out}: references, target, drawn, difference, depth (.png), turntable.webp")


def mesh(out: Path, number: int, level: float) -> None:
    """Write the surface of a run's field."""
    model, _ = load(out)
    scene = pick(out, number)
    vertices, faces = pictures.extract_mesh(model, scene, level=level)
    pictures.write_obj(vertices, faces, out / "mesh.obj")
    pictures.save(pictures.draw_mesh(vertices, faces, scene), out / "mesh.png")
    print(f"{out}/mesh.obj: {len(vertices):,} vertices, {len(faces):,} triangles; mesh.png shows it")


def page(runs: list[Path], out: Path, people: int) -> None:
    """Write one page that compares runs: the unseen backs of new people by each of them, and their scores."""
    out.mkdir(parents=True, exist_ok=True)
    loaded = {run.name: load(run)[0] for run in runs}
    table, rows = [["run", "new people: PSNR", "SSIM", "colour error, unseen", "seen"]], []
    for number in range(people):
        scene = pick(runs[0], number)
        back = pictures.back_view(scene)
        drawn = [
            pictures.draw_image(model, model.encode(scene), scene, back.camera).colours for model in loaded.values()
        ]
        front = pictures.crop_to_body([scene.references[len(scene.references) // 2].colours], scene.references[0].mask)
        rows.append(front + pictures.crop_to_body([back.colours, *drawn], back.mask))
        print(f"\rpeople: {number + 1} of {people}", end="", flush=True)
    print()
    for run in runs:
        if (run / "scores.json").is_file():
            s = json.loads((run / "scores.json").read_text())["identity, model"]
            table.append([run.name, f"{s['psnr']:.2f}", f"{s['ssim']:.3f}", f"{s['unseen']:.3f}", f"{s['seen']:.3f}"])
    pictures.save_grid(rows, ["front (given)", "back (hidden)", *loaded], out / "backs.png")
    parts = [("The front is given, the back is seen by no reference view; each run draws it", "backs.png")]
    pictures.write_page("A body seen from the front", parts, table, out / "index.html")
    print(f"{out}/index.html")


def counts() -> None:
    """Print the parameters of every part at the paper's sizes."""
    parts = count_parameters(PAPER)
    for name, n in parts.items():
        print(f"{name:14} {n:10,}")
    total = sum(parts.values())
    print(
        f"{'sum':14} {total:10,}   the paper's Table 6: {PAPER_PARAMETERS:,}; the layers that its code uses: 6,922,628"
    )
    rest = total - parts["images"]
    print(f"{'without images':14} {rest:10,}   of its code: 6,239,556")
    print("The paper states the widths of the blocks (ViT-tiny), the image trunk (ResNet-18), the lifted colours, the")
    print("reduction, the first layer of the body, keys and values. It does not state those of the layers after them.")


def main() -> int:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m examples.transhuman", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("train", help="train a row; a run that is there is gone on with")
    one.add_argument("--row", default="attention", choices=ROWS)
    one.add_argument("--out", type=Path)
    one.add_argument("--data", type=Path, default=Path("runs/transhuman"), help="folder of the drawn scenes")
    one.add_argument("--steps", type=int, default=TrainSettings.steps)
    one.add_argument("--rate", type=float, default=TrainSettings.rate, help="highest learning rate")
    one.add_argument("--perceptual", type=float, default=0.0, help="weight of the error of random features")
    one.add_argument("--scenes", type=int, default=TrainSettings.scenes, help="scenes of a step")
    one.add_argument("--patches", type=int, default=TrainSettings.patches, help="patches of a scene")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--people", type=int, default=TrainSettings.people)
    one.add_argument("--size", type=int, default=TrainSettings.size)
    one.add_argument("--views", type=int, default=3, choices=(1, 2, 3), help="reference views; 1 is the front")
    for name in ("score", "render", "mesh"):
        other = commands.add_parser(name)
        other.add_argument("run", type=Path)
        if name == "score":
            other.add_argument("--scenes", type=int, default=8, help="of each kind")
        else:
            other.add_argument("--scene", type=int, default=0)
        if name == "mesh":
            other.add_argument("--level", type=float, default=20.0, help="density of the surface, in 1 / m")
    compared = commands.add_parser("page", help="compare runs on one page")
    compared.add_argument("runs", type=Path, nargs="+")
    compared.add_argument("--out", type=Path, default=Path("runs/transhuman/page"))
    compared.add_argument("--people", type=int, default=4)
    commands.add_parser("counts", help="parameters at the paper's sizes")
    given = parser.parse_args()
    try:
        if given.command == "train":
            views = {1: (1,), 2: (0, 2), 3: (0, 1, 2)}[given.views]
            settings = replace(
                TrainSettings(),
                steps=given.steps,
                scenes=given.scenes,
                patches=given.patches,
                rate=given.rate,
                perceptual=given.perceptual,
                seed=given.seed,
                people=given.people,
                size=given.size,
                references=views,
            )
            out = given.out or Path(f"runs/transhuman/{given.row}-{given.seed}")
            train(ROWS[given.row], settings, out, data=given.data)
            print(f"trained: {out}; next: python -m examples.transhuman score {out}")
        elif given.command == "score":
            score(given.run, given.scenes)
        elif given.command == "render":
            render(given.run, given.scene)
        elif given.command == "mesh":
            mesh(given.run, given.scene, given.level)
        elif given.command == "page":
            page(given.runs, given.out, given.people)
        else:
            counts()
    except MixerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
