"""Use any mixer as the ``attn_layer`` of timm's Vision Transformers, and the papers' models in ``timm.create_model``.

Importing this module registers the models: ``timm.list_models`` shows them among timm's own.
"""

from .require import require_timm

require_timm()

from .attention import MixerAttention as MixerAttention  # noqa: E402  (require_timm has checked timm)
from .attention import attention_class as attention_class  # noqa: E402
from .pyramid import PYRAMID_NAMES as PYRAMID_NAMES  # noqa: E402
from .pyramid import MixerPyramid as MixerPyramid  # noqa: E402
from .vision_transformer import MODEL_NAMES as MODEL_NAMES  # noqa: E402
from .vision_transformer import MixerVisionTransformer as MixerVisionTransformer  # noqa: E402
from .vision_transformer import checkpoint_filter as checkpoint_filter  # noqa: E402
