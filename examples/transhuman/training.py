"""Train a field on scenes of the small body; a run goes on after any interruption."""

from __future__ import annotations

import json
import math
import pickle
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmix import MixerError
from tokenmix.system.files import whole_file, write_json

from .model import TransHuman, TransHumanConfig, make_clusters
from .scenes import PLAIN, Scene, draw_scene
from .volume import draw_patches, draw_rays, pixel_centres

CONFIG, STATE, LOG = "config.json", "state.pt", "log.jsonl"


@dataclass(frozen=True)
class TrainSettings:
    """A training.

    Attributes:
        people, poses: identities of training, and poses of each; a scene is one pair.
        size: rows and columns of an image.
        references: reference views that are used, from the first to the third.
        scenes: in a step.
        patches, side: square patches of a target image of each of them, and their pixels along a side.
        samples: of a ray.
        single: share of the steps that see one reference view only, so that one model serves one view and several.
        perceptual: weight of the squared error of features of a fixed random network of convolutions, beside that of
            the colours; the paper's features are those of a trained one, whose weights are not at hand.
        rate: highest learning rate; it rises over the first 100 steps and falls by a cosine to a hundredth.
    """

    steps: int = 2400
    seed: int = 0
    people: int = 200
    poses: int = 2
    size: int = 64
    references: tuple[int, ...] = (0, 1, 2)
    scenes: int = 2
    patches: int = 2
    side: int = 8
    samples: int = 20
    single: float = 0.25
    perceptual: float = 0.0
    rate: float = 2e-3
    save_every: int = 250
    log_every: int = 25

    def __post_init__(self) -> None:
        for name in ("steps", "people", "poses", "size", "scenes", "patches", "side", "samples", "rate"):
            if not getattr(self, name) > 0:
                raise MixerError(f"TrainSettings: {name} must be positive, got {getattr(self, name)}.")
        if self.side > self.size:
            raise MixerError(f"TrainSettings: patches of {self.side} pixels do not fit into images of {self.size}.")


HELD_OUT = 10_000
"""Numbers of people and poses from here on are never trained on."""


def cached_scenes(settings: TrainSettings, folder: Path) -> list[Scene]:
    """Return the scenes of training, drawn once for all runs that share a folder."""
    file = folder / f"scenes-{settings.people}x{settings.poses}-{settings.size}.pt"
    if file.exists():
        try:
            return torch.load(file, weights_only=False)  # written below by this program
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError):
            raise MixerError(f"{file} is damaged; delete it, and the scenes are drawn again.") from None
    found = []
    total = settings.people * settings.poses
    for person in range(settings.people):
        for pose in range(settings.poses):
            found.append(draw_scene(person, person * settings.poses + pose, size=settings.size))
            if len(found) % 10 == 0 or len(found) == total:
                print(f"\rscenes: {len(found)} of {total}", end="", flush=True)
    print()
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as f:
        torch.save(found, f)
    return found


def build(config: TransHumanConfig, seed: int) -> TransHuman:
    """Return a new model; the clusters do not depend on the seed."""
    torch.manual_seed(seed)
    surface = PLAIN.rest
    return TransHuman(config, make_clusters(surface, config.clusters), surface)


def loss_of(model: TransHuman, scene: Scene, settings: TrainSettings, generator: torch.Generator) -> Tensor:
    """Return the squared error of the colours of some patches of a target view."""
    if float(torch.rand((), generator=generator)) < settings.single:
        scene = scene.with_references((int(torch.randint(len(scene.references), (), generator=generator)),))
    view = scene.targets[int(torch.randint(len(scene.targets), (), generator=generator))]
    picked = draw_patches(view.mask, patches=settings.patches, side=settings.side, share=0.8, generator=generator)
    pixels = pixel_centres(view.camera.size)[picked]
    drawn = draw_rays(
        model, model.encode(scene), scene, view.camera, pixels, samples=settings.samples, generator=generator
    )
    truth = view.colours.flatten(1).T[picked]
    loss = (drawn.colours - truth).square().mean()
    if settings.perceptual:
        side = settings.side
        a, b = (random_features(t.reshape(-1, side, side, 3).permute(0, 3, 1, 2)) for t in (drawn.colours, truth))
        loss = loss + settings.perceptual * (a - b).square().mean()
    return loss


def random_features(patches: Tensor, *, width: int = 32) -> Tensor:
    """Return features (P, width, h, w) of patches (P, 3, h, w): two convolutions with fixed random weights."""
    g = torch.Generator().manual_seed(0)
    first, second = (torch.randn(width, n, 3, 3, generator=g) * (2 / (9 * n)) ** 0.5 for n in (3, width))
    x = torch.nn.functional.conv2d(patches, first.to(patches), padding=1).relu()
    return torch.nn.functional.conv2d(x, second.to(patches), padding=1).relu()


def rate_at(step: int, settings: TrainSettings) -> float:
    """Return the learning rate of a step."""
    if step < 100:
        return settings.rate * (step + 1) / 100
    share = (step - 100) / max(1, settings.steps - 100)
    return settings.rate * (0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2)


def read_log(out: Path) -> list[dict[str, float]]:
    """Return the lines of a run's log; one that was being written when the run was stopped is left out."""
    if not (out / LOG).exists():
        return []
    text = (out / LOG).read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def train(
    config: TransHumanConfig, settings: TrainSettings, out: Path, *, data: Path, quiet: bool = False
) -> TransHuman:
    """Train a model and write its run folder; a run that is there already is gone on with.

    Each step draws from a generator of its own, so a resumed run equals one that was never interrupted.
    """
    described = {"model": asdict(config), "training": asdict(settings) | {"references": list(settings.references)}}
    out.mkdir(parents=True, exist_ok=True)
    if (out / CONFIG).exists() and json.loads((out / CONFIG).read_text()) != described:
        raise MixerError(f"{out} holds a run with another config; give another folder, or delete it.")
    write_json(out / CONFIG, described)
    scenes = [scene.with_references(settings.references) for scene in cached_scenes(settings, data)]
    model = build(config, settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.99), weight_decay=0.01)
    done, spent = 0, 0.0
    if (out / STATE).exists():
        saved = read_state(out)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done, spent = saved["step"], saved["cpu_seconds"]
    kept = [line for line in read_log(out) if line["step"] <= done]
    with whole_file(out / LOG) as f:
        f.write("".join(json.dumps(line) + "\n" for line in kept).encode())
    begin, last = time.process_time(), []
    for step in range(done, settings.steps):
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
        picked = torch.randint(len(scenes), (settings.scenes,), generator=generator).tolist()
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, settings)
        loss = torch.stack([loss_of(model, scenes[i], settings, generator) for i in picked]).mean()
        optimizer.zero_grad(set_to_none=True)
        if loss.requires_grad:  # else no ray of the step came near a body, and there is nothing to learn
            loss.backward()
            if not torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
                raise MixerError(f"train: the gradient of step {step} is not finite; lower the rate ({settings.rate}).")
            optimizer.step()
        last.append(float(loss.detach()))
        if (step + 1) % settings.log_every == 0 or step + 1 == settings.steps:
            seconds = spent + time.process_time() - begin
            line = {"step": step + 1, "loss": sum(last) / len(last), "cpu_seconds": round(seconds, 1)}
            with open(out / LOG, "a") as f:
                f.write(json.dumps(line) + "\n")
            if not quiet:
                pace = (step + 1 - done) / max(1e-9, time.process_time() - begin)
                print(f"\rstep {step + 1} of {settings.steps}, loss {line['loss']:.4f}, {pace:.2f} steps/s", end="")
            last = []
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            state: dict[str, Any] = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step + 1,
                "cpu_seconds": spent + time.process_time() - begin,
            }
            with whole_file(out / STATE) as f:
                torch.save(state, f)
    if not quiet:
        print()
    return model.eval()


def read_state(out: Path) -> dict[str, Any]:
    """Read the state of a run: weights, optimiser, steps."""
    try:
        state: dict[str, Any] = torch.load(out / STATE, weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as why:
        raise MixerError(f"{out / STATE} cannot be read: {str(why).splitlines()[0]}") from None
    return state


def load(out: Path) -> tuple[TransHuman, TrainSettings]:
    """Load the model of a run folder."""
    for name in (CONFIG, STATE):
        if not (out / name).is_file():
            raise MixerError(f"{out} is no run of this example: {name} is missing.")
    described = json.loads((out / CONFIG).read_text())
    settings = TrainSettings(**described["training"] | {"references": tuple(described["training"]["references"])})
    model = build(TransHumanConfig(**described["model"]), settings.seed)
    model.load_state_dict(read_state(out)["model"])
    return model.eval(), settings
