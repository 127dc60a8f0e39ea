"""The adapter's one need, checked before anything of it is imported: a transformers that is new enough."""

from __future__ import annotations

from importlib import metadata

from ...errors import MixerError
from ...system.torchvision import ensure_torchvision

OLDEST = (5, 16)


def check_transformers() -> None:
    """Refuse a transformers that is missing or too old, with the extra that brings the right one."""
    try:
        found = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        raise MixerError("tokenmix.hosts.huggingface needs transformers, which is not installed: pip install 'tokenmix[hf]'.") from None
    if tuple(int(n) for n in found.split(".")[:2]) < OLDEST:
        wanted = ".".join(str(n) for n in OLDEST)
        raise MixerError(f"tokenmix.hosts.huggingface needs transformers >= {wanted}, found {found}: pip install -U 'tokenmix[hf]'.")


check_transformers()
ensure_torchvision()
