"""Time the examples that docs/gallery.md lists, and write its tables: a script and a hook of mkdocs.

    python benchmarks/gallery.py             # runs every example once, and records how long it takes
    python benchmarks/gallery.py nanoaft     # runs one

The time is that of the CPU, start of Python and imports included: it depends little on what else the machine does.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from notebooks import NOTEBOOKS
from tokenmix.lab.bench.roofline import machine

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "benchmarks/results/gallery.json"
MARK = "<!-- examples -->"
RUN_NOTEBOOK = "import json, sys, tokenmix.hosts.torchvision; names = {'__name__': '__main__'}\n" + (
    "for cell in json.load(open(sys.argv[1]))['cells']:\n"
    "    if cell['cell_type'] == 'code' and 'tags' not in cell['metadata']:\n"
    "        exec(''.join(cell['source']), names)\n"
)
"""Runs the cells of a notebook, without those that show an error; also beside a torchvision built for another torch."""


START = {"python": [], "tokenmix": ["-m", "tokenmix"], "torchrun": ["-m", "torch.distributed.run"]}
"""What starts the program of a command, by its name, in the interpreter that runs this."""


class Example(NamedTuple):
    """A line of the gallery.

    Attributes:
        shows: what a reader learns from it.
        command: what runs it, from the folder of the repository; OUT is a folder to write to.
        page: the page that explains it.
    """

    shows: str
    command: str
    page: str


PROGRAMS = {
    "nanoaft": Example(
        "a language model without attention in one file of torch: define, train for a minute, write",
        "python examples/nanoaft.py",
        "mixers/aft_forget.md",
    ),
    "transhuman": Example(
        "a body seen from the front, its unseen back drawn by tokens that talk to each other",
        "python -m examples.transhuman train --steps 5 --people 2 --out OUT/run --data OUT",
        "bodies.md",
    ),
    "own_task": Example(
        "a task of your own in the training loop: count the letters of a sequence",
        "tokenmix train examples/own_task.py --out OUT",
        "own-task.md",
    ),
    "context_parallel": Example(
        "one long sequence shared among two processes, with its gradient",
        "torchrun --nproc-per-node 2 examples/context_parallel.py --length 8192 --steps 3",
        "scale.md",
    ),
    "video": Example(
        "clips: which way does a shape move? Mixers on a grid of time, rows and columns",
        "python examples/video.py hydra --steps 20 --out OUT",
        "vision.md#video",
    ),
    "detector": Example(
        "boxes round shapes: RetinaNet of torchvision on a backbone of this library",
        "python examples/detector.py pvt --steps 20 --out OUT",
        "dense.md#the-pyramid-in-a-detector",
    ),
    "accelerate_lm": Example(
        "our layers in a loop of Hugging Face's accelerate",
        "python examples/accelerate_lm.py --steps 5",
        "scale.md#with-other-trainers",
    ),
}
SHOWS = {
    "index": "build a mixer, stream it, generate with a language model",
    "from-attention-to-aft": "six steps from softmax attention to AFT, and five relatives",
    "positions": "rotations, biases and digit positions, and which mixer takes which",
    "contract": "what every mixer keeps, and how to test your own layer",
    "training": "train a small model, stop, resume with the same numbers",
    "vision": "build ViTs from any mixer, count their operations",
    "hosts/torch": "put a mixer in the place of nn.MultiheadAttention",
    "hosts/surgery": "replace attention in BERT and other models, train the new layers, restore the old",
}
"""What each notebook shows, by its page."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables where a page of the documentation asks for them; mkdocs calls this."""
    return markdown.replace(MARK, tables(json.loads(RECORD.read_text()))) if MARK in markdown else markdown


def tables(record: dict[str, Any]) -> str:
    """Return a table of the programs and one of the notebooks, with the recorded times."""
    lines = ["| program | shows | seconds |", "|---|---|---|"]
    for name, each in PROGRAMS.items():
        said = f"{each.shows} ([page]({each.page})): `{each.command.replace('OUT', 'runs/own')}`"
        file = f"{name}.py" if (ROOT / "examples" / f"{name}.py").exists() else name
        lines.append(f"| `examples/{file}` | {said} | {record['seconds'][name]:.0f} |")
    lines += ["", "| notebook | shows | seconds |", "|---|---|---|"]
    for page, name in NOTEBOOKS.items():
        seconds = record["seconds"][name]
        lines.append(f"| `examples/{name}.ipynb` | {SHOWS[page]} ([page]({page}.md)) | {seconds:.0f} |")
    where = record["machine"]
    said = (
        f"Seconds of the CPU on {where['device']}, {where['threads']} thread, torch {where['torch']}, start included."
    )
    return "\n".join([*lines, "", f"*{said} `python benchmarks/gallery.py` measures them.*"])


def measure(name: str) -> float:
    """Run an example and return the seconds of the CPU that it takes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", RUN_NOTEBOOK, f"examples/{name}.ipynb"]
        if name in PROGRAMS:
            program, *words = PROGRAMS[name].command.replace("OUT", f"{folder}/out").split()
            command = [sys.executable, *START[program], *words]
        paths = os.pathsep.join(str(ROOT / part) for part in ("src", "examples"))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    found = json.loads(RECORD.read_text()) if RECORD.exists() else {"seconds": {}}
    for name in sys.argv[1:] or [*PROGRAMS, *NOTEBOOKS.values()]:
        found["seconds"][name] = round(measure(name), 1)
        found["machine"] = {**machine(), "threads": 1}
        RECORD.write_text(json.dumps(found, indent=1) + "\n")
