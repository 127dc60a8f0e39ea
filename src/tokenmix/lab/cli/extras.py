"""Try the packages of each extra as users do: in another process, without this library."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys

from ...system.torchvision import REPAIR, reinstall_torchvision

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
    "points": (("numpy", "trimesh"), "import trimesh; trimesh.Trimesh(vertices=[[0, 0, 0]], faces=[[0, 0, 0]])"),
    "bodies": (
        ("numpy", "pillow", "scikit-learn", "scikit-image"),
        "import PIL.Image, sklearn.cluster; from skimage.measure import marching_cubes",
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
        ("transformers", "huggingface_hub", "safetensors"),
        "import transformers; transformers.GPT2LMHeadModel; import transformers.models.qwen3_next.modeling_qwen3_next",
    ),
    "tables": (("pyarrow",), "import pyarrow.parquet"),
    "onnx": (
        ("numpy", "onnx", "onnxscript", "onnxruntime"),
        "import onnx, onnxscript, onnxruntime; onnxruntime.get_available_providers()",
    ),
}
"""Extra -> its packages, and what users do with them."""
TORCHVISION = f"""
said = ""
try:
    import torchvision
except Exception as why:
    said = str(why)
if "torchvision::" in said:
    {REPAIR}, torchvision
    raise Warning("mended")
"""
MENDED = "Warning: mended"
NOTE = (
    "torchvision was built for another torch, which tokenmix mends for itself; in scripts of your own write "
    + f"`{REPAIR}` before timm and transformers, or "
)
SECONDS = 300
MARK = "\x1e"  # begins the lines that are read; what packages print does not
TRY = f"""
import json, sys
def use(code):
    try:
        exec(code, {{}})
    except BaseException as why:
        cause, chain = why, [why]
        while cause := cause.__cause__ or cause.__context__:
            chain.append(cause)
        first = next((each for each in chain if "torchvision::" in str(each)), why)
        return f"{{type(first).__name__}}: {{first}}"
    return "ok"
def say(*words):
    print("\\n" + {MARK!r} + json.dumps(words), flush=True)
for name, code in json.loads(sys.argv[1]).items():
    say(name, None)
    say(name, use(code))
"""
"""What the other process does: use each, and say its name before, and the outcome after."""


def versions(extra: str) -> dict[str, str | None]:
    """Return the installed version of each package of an extra; None: it is missing."""
    return {package: installed_version(package) for package in EXTRAS[extra][0]}


def installed_version(package: str) -> str | None:
    """Return the version of a package; None: it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def try_extras() -> tuple[dict[str, str], str]:
    """Use each extra whose packages are all installed.

    Returns:
        "ok", or what fails and what mends it, by extra; and what is to be known of torchvision, which some of them
        import, or "".
    """
    uses = {"torchvision": TORCHVISION}
    uses |= {extra: use for extra, (_, use) in EXTRAS.items() if all(versions(extra).values())}
    found: dict[str, str] = {}
    while left := {name: use for name, use in uses.items() if name not in found}:
        found |= _try_uses(left)
    mended = found.pop("torchvision") == MENDED
    told = {extra: said if said == "ok" else f"{said}; {_repair_hint(extra, said)}" for extra, said in found.items()}
    return told, NOTE + reinstall_torchvision() if mended else ""


def _try_uses(uses: dict[str, str]) -> dict[str, str]:
    """Return the outcomes of those that one process used; where it ends early, that is the outcome of the last."""
    command = [sys.executable, "-W", "ignore", "-c", TRY, json.dumps(uses)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True, errors="replace")
    try:
        written = process.communicate(timeout=SECONDS)[0]
        end = f"the process that used it ended with code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        written = process.communicate()[0]
        end = f"using it takes more than {SECONDS} seconds"
    lines = [json.loads(line.removeprefix(MARK)) for line in written.split("\n") if line.startswith(MARK)]
    found = {name: end if said is None else " ".join(said.split())[:200].rstrip(".") for name, said in lines}
    return found or dict.fromkeys(uses, end)


def _repair_hint(extra: str, said: str) -> str:
    if "torchvision" in said:
        return f"torchvision was built for another torch: {reinstall_torchvision()}"
    return f"pip install --upgrade --force-reinstall 'tokenmix[{extra}]'"
