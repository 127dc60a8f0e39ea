"""Use any mixer as the ``attn_layer`` of timm's Vision Transformers, and the papers' models in ``timm.create_model``.

Importing this module registers the models: ``timm.list_models`` shows them among timm's own.
"""

from .require import require_timm

require_timm()

from .attention import MixerAttention, attention_class  # noqa: E402  (timm is imported where it is known to be there)
from .pyramid import PYRAMID_NAMES, MixerPyramid  # noqa: E402  (as above)
from .vision_transformer import MODEL_NAMES, MixerVisionTransformer, checkpoint_filter  # noqa: E402  (as above)

__all__ = [
    "MODEL_NAMES",
    "MixerAttention",
    "MixerPyramid",
    "MixerVisionTransformer",
    "PYRAMID_NAMES",
    "attention_class",
    "checkpoint_filter",
]
