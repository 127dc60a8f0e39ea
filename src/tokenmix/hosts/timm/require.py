"""timm, or one line that says how to get it."""

from __future__ import annotations

import inspect

from ...errors import MixerError
from ...system.torchvision import ensure_torchvision


def require_timm() -> None:
    """Import timm; refuse where it is missing, or older than its Vision Transformers' ``attn_layer``."""
    try:
        ensure_torchvision()
        import timm
        from timm.models.vision_transformer import Block, VisionTransformer
    except ImportError as why:
        raise MixerError(f"tokenmix.hosts.timm needs timm, which does not import ({why}): pip install 'tokenmix[vision]'.") from why
    if any("attn_layer" not in inspect.signature(cls.__init__).parameters for cls in (Block, VisionTransformer)):
        raise MixerError(f"tokenmix.hosts.timm needs timm >= 1.0.27, found {timm.__version__}: pip install --upgrade 'tokenmix[vision]'.")
