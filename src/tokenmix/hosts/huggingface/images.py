"""Wrap our Vision Transformer as a transformers image classifier.

transformers reads class annotations at run time, so this file has no ``from __future__ import annotations``.
"""

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.utils.output_capturing import capture_outputs

from ...errors import MixerError
from ...models import ViT, ViTConfig
from .configuration import TokenMixConfig
from .initialization import mark_self_initialized
from .layers import TokenMixImageLayer
from .modeling import TokenMixPreTrainedModel


class TokenMixViT(ViT):
    """``ViT`` with layers that transformers can checkpoint."""

    block_class = TokenMixImageLayer

    def __init__(self, config: ViTConfig):
        super().__init__(config)
        mark_self_initialized(self)


class TokenMixForImageClassification(TokenMixPreTrainedModel):
    """Classify images with ``tokenmix.models.ViT`` and any mixers; its parameters are under ``vit``.

    Args:
        config: a ``TokenMixConfig``; image_size, patch_size, num_channels, num_register_tokens, classifier_pooling
            "cls" or "mean", num_labels.
    """

    base_model_prefix = "vit"
    main_input_name = "pixel_values"
    input_modalities = "image"
    _can_record_outputs = {"hidden_states": TokenMixImageLayer}

    def __init__(self, config: TokenMixConfig):
        if config.is_causal:
            ordered = "the config says is_causal=True, but patches of an image have no order"
            raise MixerError(f"TokenMixForImageClassification: {ordered}; leave it out.")
        super().__init__(config.but(is_causal=False))
        self.num_labels = config.num_labels
        self.vit = TokenMixViT(self.config.vit())
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the map from patches to tokens."""
        return self.vit.patch

    def set_input_embeddings(self, value: Any) -> None:
        """Replace the map from patches to tokens."""
        self.vit.patch = value

    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, pixel_values: Tensor | None = None, labels: Tensor | None = None, **kwargs: object
    ) -> ImageClassifierOutput:
        """Map normalised images (B, C, H, W) to logits (B, labels)."""
        if pixel_values is None:
            raise MixerError("TokenMixForImageClassification: needs pixel_values.")
        logits = self.vit(pixel_values)
        loss_options = {"num_items_in_batch": kwargs["num_items_in_batch"]} if "num_items_in_batch" in kwargs else {}
        loss = None
        if labels is not None:
            loss = self.loss_function(labels, logits, self.config, **loss_options)
        return ImageClassifierOutput(loss=loss, logits=logits)
