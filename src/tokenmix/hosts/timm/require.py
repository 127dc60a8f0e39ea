"""Check that timm is installed; the error says how to install it."""

from __future__ import annotations

import inspect

from ...errors import MixerError
from ...system.torchvision import ensure_torchvision


def require_timm() -> None:
    """Import timm; refuse if it is missing, or too old for its Vision Transformers to have ``attn_layer``."""
    try:
        ensure_torchvision()
        import timm
        from timm.models.vision_transformer import Block, VisionTransformer
    except ImportError as why:
        raise MixerError(
            f"tokenmix.hosts.timm needs timm, which could not be imported ({why}): pip install 'tokenmix[vision]'."
        ) from why
    if any("attn_layer" not in inspect.signature(cls.__init__).parameters for cls in (Block, VisionTransformer)):
        found = f"needs timm >= 1.0.27, found {timm.__version__}"
        raise MixerError(f"tokenmix.hosts.timm {found}: pip install --upgrade 'tokenmix[vision]'.")
