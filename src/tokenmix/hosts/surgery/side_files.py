"""Copy what a model's folder holds beside its weights: tokenizer, processor, defaults, modules that follow it.

Everything is copied but weights, what training leaves, and the files that are written anew.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ...errors import MixerError

WRITTEN = {"config.json", "report.json"}
"""Files that belong to the model that was read, of which a new model has its own or none."""
WEIGHTS = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".ot"),
    *(".gguf", ".onnx", ".npz", ".tflite", ".distcp"),
}
TRAINING = {"trainer_state.json", "training_args.json"}
MODULES = "modules.json"
"""The file in which sentence-transformers lists the modules of a model and their folders."""


def copy_side_files(source: Path, target: Path) -> None:
    """Copy all files of a model's folder but its weights; files that are links are copied as what they point to.

    A folder in it is copied if ``modules.json`` names it, with the weights of that module, or if it holds no weights.
    """
    modules = _module_folders(source)
    for path in sorted(source.iterdir()):
        if path.is_file() and _belongs(path):
            shutil.copyfile(path, target / path.name)
        elif path.is_dir() and (path.name in modules or not (_hidden(path) or _holds_weights(path))):
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)


def _belongs(path: Path) -> bool:
    """Return whether a file beside the weights describes the model."""
    return not (
        _hidden(path)
        or path.name in WRITTEN | TRAINING
        or path.suffix in WEIGHTS
        or path.name.endswith(".index.json")  # of weights in several files
    )


def _hidden(path: Path) -> bool:
    return path.name.startswith(".")


def _holds_weights(folder: Path) -> bool:
    return any(path.suffix in WEIGHTS for path in folder.rglob("*"))


def _module_folders(source: Path) -> set[str]:
    """Return the folders of the modules that sentence-transformers run after the model.

    Raises:
        MixerError: if the list of modules cannot be read.
    """
    file = source / MODULES
    if not file.is_file():
        return set()
    try:
        return {str(module["path"]).split("/")[0] for module in json.loads(file.read_text()) if module["path"]}
    except (ValueError, TypeError, KeyError, OSError) as why:
        raise MixerError(f"{file}: is no list of modules ({type(why).__name__}: {why}).") from None
