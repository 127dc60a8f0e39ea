"""Try the packages of each extra as users do: in a process of its own, without this library."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from ..system.torchvision import REPAIR, reinstall_torchvision

EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "train": (
        ("numpy", "tyro", "pyyaml", "rich", "safetensors"),
        "import numpy, torch, tyro, yaml, rich.progress; from safetensors.torch import save; "
        "save({'a': torch.ones(1)})",
    ),
    "vision": (
        ("numpy", "pillow", "scikit-learn", "timm"),
        "import timm, PIL.Image, sklearn.linear_model; timm.create_model('vit_tiny_patch16_224', depth=1)",
    ),
    "text": (
        ("tokenizers", "sacrebleu", "rouge-score", "scikit-learn"),
        "import sacrebleu, sklearn.linear_model, rouge_score.rouge_scorer; from tokenizers import Tokenizer, models; "
        "Tokenizer(models.BPE())",
    ),
    "plot": (
        ("numpy", "matplotlib", "jinja2", "plotext"),
        "import matplotlib; matplotlib.use('Agg'); import jinja2, plotext, matplotlib.pyplot as p; p.figure()",
    ),
    "tensorboard": (("numpy", "tensorboard"), "from torch.utils.tensorboard import SummaryWriter"),
    "hf": (
        ("transformers", "safetensors"),
        "import transformers; transformers.GPT2LMHeadModel; import transformers.models.qwen3_next.modeling_qwen3_next",
    ),
    "onnx": (
        ("numpy", "onnx", "onnxscript", "onnxruntime"),
        "import onnx, onnxscript, onnxruntime; onnxruntime.get_available_providers()",
    ),
}
"""Extra -> its packages, and what users do with them."""
SECONDS = 300


def versions(extra: str) -> dict[str, str | None]:
    """Return the installed version of each package of an extra; None: it is missing."""
    return {package: installed_version(package) for package in EXTRAS[extra][0]}


def installed_version(package: str) -> str | None:
    """Return the version of a package; None: it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def try_extras() -> dict[str, str]:
    """Use each extra whose packages are all installed; return "ok", or what fails and what mends it."""
    running = {extra: _start(use) for extra, (_, use) in EXTRAS.items() if all(versions(extra).values())}
    found = {}
    for extra, process in running.items():
        said = _failure(process)
        found[extra] = "ok" if said is None else f"{said}; {_mend(extra, said)}"
    return found


def _start(use: str) -> subprocess.Popen[str]:
    command, quiet = [sys.executable, "-W", "ignore", "-c", use], subprocess.DEVNULL
    return subprocess.Popen(command, stdout=quiet, stderr=subprocess.PIPE, text=True, errors="replace")


def _failure(process: subprocess.Popen[str]) -> str | None:
    """Return the line of what a process wrote that says why it failed, the last if none names torchvision; None: it
    ended well.
    """
    try:
        said = process.communicate(timeout=SECONDS)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"importing it takes more than {SECONDS} seconds"
    lines = [line for line in said.splitlines() if line.strip()] or [f"ended with code {process.returncode}"]
    ends = [line for line in lines if not line.startswith(" ")] or lines  # neither code nor its place
    why = next((line for line in ends if "torchvision::" in line), ends[-1])
    return None if process.returncode == 0 else " ".join(why.split())[:200].rstrip(".")


def _mend(extra: str, said: str) -> str:
    if "torchvision" not in said:
        return f"pip install --upgrade --force-reinstall 'tokenmix[{extra}]'"
    mended = _failure(_start(f"{REPAIR}; {EXTRAS[extra][1]}")) is None
    line = f"write `{REPAIR}` before the imports, or " if mended else ""
    return f"torchvision was built for another torch: {line}{reinstall_torchvision()}"
