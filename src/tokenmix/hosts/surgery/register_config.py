"""Let transformers' AutoConfig know the config.json of converted hosts. Needs transformers."""

from __future__ import annotations

from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from .converted_config import BEFORE, CONVERTED, ConvertedConfig


def register_config() -> None:
    """Register the configs of converted hosts."""
    AutoConfig.register(CONVERTED, ConvertedConfig, exist_ok=True)
    CONFIG_MAPPING.register(BEFORE, ConvertedConfig, exist_ok=True)


register_config()
