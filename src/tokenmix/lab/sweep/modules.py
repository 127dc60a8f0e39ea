"""Python files of a sweep that register mixers of one's own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from ...errors import MixerError
from ...system.torchvision import torchvision_hint


def load_modules(files: Iterable[str]) -> None:
    """Import Python files, each once per process.

    Raises:
        MixerError: for a file that does not exist or cannot be imported.
    """
    for file in files:
        path = Path(file).resolve()
        name = f"tokenmix_sweep_{path.stem}"
        known = sys.modules.get(name)
        if known is not None and known.__file__ == str(path):
            continue
        spec = importlib.util.spec_from_file_location(name, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise MixerError(f"sweep: the module {file} is not a Python file that exists.")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as why:
            del sys.modules[name]
            reason = f"{type(why).__name__}: {why}"
            raise MixerError(f"sweep: the module {file} cannot be imported ({reason}){torchvision_hint(why)}.") from why
