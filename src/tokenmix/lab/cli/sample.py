"""The verb sample: what a run's model writes, draws, fills in or takes a text for."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ...errors import MixerError
from ...types import Options
from .host_folders import is_host_folder, sample_host
from .output import say

OF_FLOW, FLOWS = ("classes", "guidance", "solver", "solver_steps"), "diffusion transformers"
OF_VALUES = ("temperature", "top_k", "top_p", "complete")
"""Options of models that follow a flow, and of those that sample one value after the other."""


@dataclass(frozen=True)
class Sample:
    """Generate text with a run's language model, or images with its density model or diffusion transformer.

    Masked models fill in masks, classifiers of texts name the class.
    """

    dir: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Run directory, or a host's folder: one that `tokenmix convert` wrote, or one of transformers."""

    tokens: int | None = None
    """Host's folder: number of tokens to generate. Default: 50, or as many as the model's length allows."""

    bytes: int | None = None
    """Text: number of bytes to generate. Default: 500, or as many as the model's length allows."""

    prompt: str = "\n"
    """Text: prompt to continue. Default: a line break. Arithmetic and strings: the question, such as 12+345= .
    Encoder-decoders: the source, such as a sentence to translate. Masked models: a text with <mask> in it;
    those of spans, with <extra_0>, <extra_1> and so on.
    Classifiers of texts: the text, or two texts with a tab between them."""

    beams: int | None = None
    """Encoder-decoders: targets that are followed at once. Default: 1."""

    images: int = 16
    """Number of images to draw."""

    complete: bool = False
    """Density models: draw only the lower halves of test images, with the real images shown below."""

    out: Path | None = None
    """Images: PNG file to write. Default: sample.png in the run directory."""

    classes: tuple[str, ...] | None = None
    """Diffusion transformers: names of the classes to draw, one image of each in turn. Default: all."""

    guidance: float | None = None
    """Diffusion transformers: weight of classifier-free guidance towards the class. Default: 1, which is none."""

    solver: Literal["euler", "heun"] | None = None
    """Diffusion transformers: how the flow is followed from noise to images. Default: heun."""

    solver_steps: int | None = None
    """Diffusion transformers: steps of the solver; each of heun's evaluates the model twice. Default: 50."""

    temperature: float | None = None
    """Sampling temperature; 0 takes the most likely value. Default: 0.8 for text, 1 for images, 0 otherwise."""

    top_k: int | None = None
    """Sample among the k most likely values. Default: all."""

    top_p: float | None = None
    """Sample among the fewest values that together have this probability. Default: all."""

    seed: int | None = None
    """Seed that makes the sample repeatable. Default: a different sample each time."""

    step: str = "last"
    """Checkpoint to use: a step, last or best."""

    device: str = "auto"
    """Device to run on: auto, cpu or cuda."""

    json: bool = False
    """Print the prompt and its continuation, or the path of the picture, as JSON."""

    def run(self) -> int:
        """Generate what the run's model generates."""
        from ..train.rundir import RunDir
        from ..train.tasks import task_of

        if is_host_folder(self.dir):
            return sample_host(self)
        if self.tokens is not None:
            raise MixerError(f"sample: --tokens is for a host's folder; the model of {self.dir} counts --bytes.")
        config = RunDir.open(self.dir).config()
        task = task_of(config)
        if task.writes == "translate":
            return self._translate()
        if self.beams is not None:
            raise MixerError(
                f"sample: --beams is for encoder-decoders; {self.dir} holds a {config.model.kind!r} model."
            )
        self._check_options(config.model.kind, flows=task.writes == "generate")
        if task.writes == "write":
            return self._write(task.temperature)
        ways = {"fill": self._fill, "classify": self._classify, "generate": self._generate}
        return ways.get(task.writes, self._draw)()  # which refuses what draws no images

    def _check_options(self, kind: str, *, flows: bool) -> None:
        """Refuse options of diffusion transformers for other models, and the other way round."""
        of_flow = [name for name in OF_FLOW if getattr(self, name) is not None]
        of_values = [name for name in OF_VALUES if getattr(self, name) not in (None, False)]
        wrong, whose = (of_values, "density and language models") if flows else (of_flow, FLOWS)
        if wrong:
            option = wrong[0].replace("_", "-")
            raise MixerError(f"sample: --{option} is for {whose}; {self.dir} holds a {kind!r} model.")

    def _sampling_options(self, temperature: float) -> Options:
        """Return the options that all kinds share; ``temperature`` is the default of the kind."""
        temperature = temperature if self.temperature is None else self.temperature
        chosen: Options = {
            "temperature": temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "seed": self.seed,
        }
        return {**chosen, "step": self.step, "device": self.device}

    def _write(self, temperature: float) -> int:
        from ..train import sample_run

        start = os.fsencode(self.prompt)  # the bytes that were typed, whether or not they are valid text
        text = sample_run(self.dir, n=self.bytes, prompt=start, **self._sampling_options(temperature))
        if self.json:
            say(json.dumps({"prompt": self.prompt, "text": text[len(start) :].decode(errors="replace")}))
        else:
            say(text.decode(errors="replace"))
        return 0

    def _translate(self) -> int:
        from ..train import translate_run

        written = translate_run(
            self.dir, self.prompt, beams=1 if self.beams is None else self.beams, **self._sampling_options(0.0)
        )
        say(json.dumps({"prompt": self.prompt, "text": written}) if self.json else written)
        return 0

    def _fill(self) -> int:
        from ..train import fill_run

        found = fill_run(self.dir, self.prompt, step=self.step, device=self.device)
        lines = (f"{i}: " + ", ".join(f"{word} {share:.3f}" for word, share in each) for i, each in enumerate(found, 1))
        say(json.dumps({"prompt": self.prompt, "masks": found}) if self.json else "\n".join(lines))
        return 0

    def _classify(self) -> int:
        from ..train import classify_run

        found = classify_run(self.dir, *self.prompt.split("\t"), step=self.step, device=self.device)
        lines = (f"{label} {share:.3f}" for label, share in found)
        say(json.dumps({"prompt": self.prompt, "labels": dict(found)}) if self.json else "\n".join(lines))
        return 0

    def _draw(self) -> int:
        from ...system.files import check_writable
        from ..train import draw_run
        from ..train.image_tasks import write_grid

        out = self.out or self.dir / "sample.png"
        check_writable(out)
        drawn = draw_run(self.dir, n=self.images, complete=self.complete, **self._sampling_options(1.0))
        write_grid(out, drawn, columns=self.images if self.complete else 8)
        say(json.dumps({"images": self.images, "file": str(out)}) if self.json else out)
        return 0

    def _generate(self) -> int:
        from ...system.files import check_writable
        from ..train import generate_run
        from ..train.flow_task import columns_of
        from ..train.image_tasks import write_grid

        out = self.out or self.dir / "sample.png"
        check_writable(out)
        given = {"steps": self.solver_steps, "solver": self.solver, "guidance": self.guidance, "seed": self.seed}
        sampling = {name: value for name, value in given.items() if value is not None}
        drawn, names = generate_run(
            self.dir, n=self.images, classes=self.classes, step=self.step, device=self.device, **sampling
        )
        write_grid(out, drawn, columns=columns_of(len(set(names))))
        if self.json:
            say(json.dumps({"images": self.images, "file": str(out), "classes": names}))
        else:
            say(f"{out} ({legend(names)})" if names else out)
        return 0


def legend(names: list[str]) -> str:
    """Describe which images of a picture show which of the classes, drawn in turn."""
    from ..train.flow_task import columns_of

    several = list(dict.fromkeys(names))
    if len(several) == 1:
        return f"class {several[0]}"
    in_columns = columns_of(len(several)) == len(several)
    return f"columns: {', '.join(several)}" if in_columns else f"row by row: {', '.join(names)}"
