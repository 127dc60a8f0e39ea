"""`tokenmix advise`: should this model's attention be replaced?"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from ...errors import MixerError
from .arguments import check_folder, given_options, parse_lengths, parse_object
from .output import progress, say, say_json

EXAMPLE = '{"max_position_embeddings": 4096}'
PROBED = 4  # batches of the text, on which the costs of layers are measured


@dataclass(frozen=True)
class Advise:
    """Measure whether a model's attention is worth replacing.

    Report attention's share of time and memory, a bound on what replacing it can gain, and what other mixers gain in
    the runtime that will be used.
    """

    model: Positional[Annotated[str, arg(metavar="MODEL")]]
    """Model to measure: a run directory, a folder saved by transformers, or a name.
    Names are those of `tokenmix list`, classes and model types of transformers (BertModel, bert), and models of timm.
    package:factory names a callable that returns a model, or (model, inputs) with inputs(length, batch)."""

    lengths: str | None = None
    """Lengths in tokens, or sides of images in pixels, such as 256,1k,4k,16k. Default: some that the model takes."""

    candidates: str = "auto"
    """Mixers to measure inside the model: auto, a list such as hydra,aft_local:window=32, or none.
    Without candidates there is a bound, and no Yes."""

    runtime: str = "eager"
    """Where the model will run: eager, compile (torch.compile) or onnx (ONNX Runtime). It is measured there, and in
    eager torch beside it."""

    batch: int = 1
    """Inputs per forward pass."""

    seconds: float = 20.0
    """Approximate seconds for measuring attention's share; candidates take up to three times as long.
    Lengths that do not fit are skipped and reported."""

    worth: float = 1.25
    """The bar: smallest measured speed-up of the whole model, above 1, that makes replacing worthwhile."""

    budget: str | None = None
    """How many times as fast the whole model must be, such as 1.5x: choose the layers that keep attention.
    It is the bar of the candidates, and the one chosen goes into the other layers. Timed in eager torch."""

    options: str = "{}"
    """Fields of the model's config, or arguments of the factory, as a JSON object.
    The weights are then random; timing is unaffected."""

    device: str = "auto"
    """Device to measure on: auto, cpu or cuda."""

    data: Path | None = None
    """Text file: replace attention with the chosen candidate and distil the model on this text.
    The loss before and after is printed; --write names the folder for the model."""

    minutes: float = 3.0
    """Approximate minutes of distillation."""

    anyway: bool = False
    """With --data: replace and distil even where the answer is not Yes. Else nothing is replaced then, exit code 1."""

    probe: int = 20
    """With candidates: steps in which each learns the outputs of the model's attention, to rank them by nearness.
    They take up to --seconds more; fewer than 20 rank nothing, 0 skips the probe."""

    last: int | None = None
    """With --data: replace only the last N attention modules. Default: all."""

    write: Path | None = None
    """With --data: folder for the converted model; the run directory of the distillation is written beside it."""

    out: Path | None = None
    """HTML file for a page with the curves."""

    json: bool = False
    """Print everything as JSON."""

    def run(self) -> int:
        """Load, measure, distil and print the model's advice, and write the page."""
        from ...system.machine import pick_device
        from ..advise.advice import advise
        from ..advise.budget import check_budget, plan_layers
        from ..advise.distill import check_distillation, distill_choice, split_text
        from ..advise.layer_plan import parse_budget
        from ..advise.loading import load_host
        from ..advise.runtimes import check_runtime
        from ..advise.text import as_json, text

        if not 0 < self.minutes < inf:
            raise MixerError(f"advise: --minutes must be a positive number, got {self.minutes}.")
        if self.data is None and (self.write is not None or self.last is not None or self.anyway):
            raise MixerError("advise: --write, --last and --anyway are for distilling on a text; give --data TEXT too.")
        budget = None if self.budget is None else parse_budget(self.budget)
        others = {"--worth", "--runtime", "--last"} & {*given_options(self, set())}
        if budget is not None and (others or self.candidates == "none"):
            odd = min(others, default="--candidates none")
            raise MixerError(
                f"advise: --budget sets the bar, chooses layers and times in eager torch; leave out {odd}."
            )
        lengths = None if self.lengths is None else parse_lengths(self.lengths, "advise")
        check_folder("advise", self.out)
        tell = progress()
        device = pick_device(self.device).type
        check_runtime(self.runtime, device)
        tell(f"loading {self.model}")
        host = load_host(self.model, parse_object(self.options, EXAMPLE, "advise: "), device=device)
        if budget is not None:
            check_budget(host)
        candidates, batches = None if self.candidates == "none" else self.candidates, None
        if self.data is not None:
            check_distillation(host, self.data, self.write, self.last)
            candidates, batches = candidates or "auto", split_text(host, self.data)
        found = advise(
            host,
            lengths,
            batch=self.batch,
            seconds=self.seconds,
            worth=budget or self.worth,
            candidates=candidates,
            device=device,
            steps=self.probe,
            data=None if batches is None else batches[0],
            runtime=self.runtime,
            tell=tell,
        )
        if budget is not None:
            found.plan = plan_layers(
                found,
                budget,
                seconds=self.seconds,
                data=None if batches is None else batches[0][:PROBED],
                device=device,
                tell=tell,
            )
        if batches is not None and self.write is not None:
            forced = self.anyway and (found.plan is None or found.plan.chosen)
            found.refused = None if forced else found.says_no
            if found.refused is None:
                tell(f"distilling for {self.minutes:g} minutes")
                found.distilled = distill_choice(
                    found, batches, self.write, minutes=self.minutes, seconds=self.seconds, last=self.last
                )
        tell("")
        if self.json:
            say_json(as_json(found))
        else:
            say(text(found))
        if self.out is not None:
            from ..advise.advice_page import write_page

            write_page(found, self.out)
        return 0 if found.refused is None and (found.plan is None or found.plan.reachable) else 1
