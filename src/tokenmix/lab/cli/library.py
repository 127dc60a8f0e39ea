"""The verbs of the library itself: list, doctor, check and new-mixer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from .arguments import parse_object
from .output import say, say_json


@dataclass(frozen=True)
class ListAll:
    """List mixers with tier, paper, cost, capabilities and options; recipes with rows; models, corpora and images."""

    cost: int | None = None
    """Print instead the FLOPs, parameters and bytes of every mixer over this many tokens, from its own formulas."""

    dim: int = 512
    """Features per token, for --cost."""

    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Print the catalogue, or the table of costs."""
        if self.cost is not None:
            from .costs import costs, costs_text

            table = costs(self.cost, self.dim)
            if self.json:
                say_json(table)
            else:
                say(costs_text(table, self.cost, self.dim))
            return 0
        from .catalogue import catalogue, catalogue_text

        found = catalogue()
        if self.json:
            say_json(found)
        else:
            say(catalogue_text(found))
        return 0


@dataclass(frozen=True)
class Doctor:
    """Report what this installation can do and what needs fixing; the exit code is 1 if something is broken."""

    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Print the diagnosis."""
        from .doctor import diagnose, diagnosis_text

        found = diagnose()
        if self.json:
            say_json(found)
        else:
            say(diagnosis_text(found))
        return 1 if found["broken"] else 0


@dataclass(frozen=True)
class Check:
    """Run the contract suite on a layer of your own, on a mixer of this library, or on a whole model."""

    target: Positional[Annotated[str, arg(metavar="TARGET")]]
    """Layer to check: package:Class, file.py:Class, or the name of a mixer. Whole models: hf:FOLDER, a folder of
    transformers, and timm:NAME."""

    options: str = "{}"
    """Options of the layer, of timm's model, or fields that replace those of a config without weights, as a JSON
    object."""

    reference: str | None = None
    """Equation in float64 that the layer must equal: package:function or file.py:function."""

    json: bool = False
    """Print the verdicts as JSON."""

    verbose: bool = False
    """Print every input that breaks a promise, and the traceback where the layer raised."""

    device: str = "cpu"
    """Device the layer runs on: cpu, cuda, cuda:1 and so on."""

    def run(self) -> int:
        """Check the layer; 1 if it breaks a promise."""
        from ...testing.cli import main_check

        parsed = parse_object(self.options, '{"window": 8}')
        return main_check(self.target, parsed, self.json, self.reference, self.verbose, self.device)


@dataclass(frozen=True)
class NewMixer:
    """Write the skeleton of a new mixer into a checkout of this library.

    It consists of module, functional form, reference, page, rows and test case, and keeps the contract as written;
    `make quick M=NAME` checks it. Then replace its mathematics.
    """

    name: Positional[Annotated[str, arg(metavar="NAME")]]
    """Name of the mixer: a lower-case identifier such as gated_mean."""

    like: str = "pointwise"
    """Kind of mixer to begin with: pointwise (features apart), attention (weighs pairs) or recurrent (causal only)."""

    def run(self) -> int:
        """Write the files and print their paths and the next step."""
        from ...testing.new_mixer import new_mixer

        root = Path.cwd()
        for file in new_mixer(self.name, root, self.like):
            say(f"wrote {file.relative_to(root)}")
        say(f"next: make quick M={self.name}")
        say("then write the paper's equation into the reference, and continue from there (docs/adding-a-mixer.md)")
        return 0
