"""Check for a recent transformers before anything of this package needs it."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec

from ...errors import MixerError
from ...system.torchvision import ensure_torchvision

OLDEST = (5, 16)


def check_transformers() -> None:
    """Refuse a transformers that is missing or too old, naming the extra that installs the right one."""
    try:
        found = metadata.version("transformers") if find_spec("transformers") else ""
    except metadata.PackageNotFoundError:
        found = ""
    if not found:
        missing = "needs transformers, which is not installed"
        raise MixerError(f"tokenmix.hosts.huggingface {missing}: pip install 'tokenmix[hf]'.") from None
    if tuple(int(n) for n in found.split(".")[:2]) < OLDEST:
        wanted = ".".join(str(n) for n in OLDEST)
        old = f"needs transformers >= {wanted}, found {found}"
        raise MixerError(f"tokenmix.hosts.huggingface {old}: pip install -U 'tokenmix[hf]'.")


check_transformers()
ensure_torchvision()
