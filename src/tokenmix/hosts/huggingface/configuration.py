"""Configure a model of mixers for transformers."""

from __future__ import annotations

import copy
import difflib
from dataclasses import fields
from math import isfinite
from typing import Any

from transformers import PreTrainedConfig

from ...errors import MixerError
from ...mixers import MIXERS, mixer_options
from ...models import ViTConfig
from ...models.blocks import complete_spec, cycle_specs
from ...types import Options, Record, Spec

COUNTS: tuple[str, ...] = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
COUNTS += ("encoder_layers", "patch_size", "num_channels")
SHARES = ("hidden_dropout_prob", "drop_path_rate", "classifier_dropout")
CHOICES: dict[str, tuple[object, ...]] = {
    "norm": ("pre", "post"),
    "norm_type": ("layer", "rms"),
    "gated_mlp": (True, False),
    "mlp_bias": (True, False),
    "positions": ("learned", "sinusoidal", None),
    "stem": ("patch", "conv"),
    "classifier_pooling": ("mean", "cls", "last", None),
    "is_causal": (True, False, None),
    "use_cache": (True, False),
}


class TokenMixConfig(PreTrainedConfig):
    """Configure any ``TokenMix...`` model; unknown names close to a field are refused as misspelt.

    Args:
        mixers: one spec per layer, ``{"name": "aft_local", "window": 32}``, or a shorter list repeated over
            ``num_hidden_layers``; default AFT-simple. ``num_attention_heads`` and ``num_key_value_heads`` are the
            ``heads`` and ``kv_heads`` of mixers whose spec leaves them open, ``max_position_embeddings`` their
            ``max_len``.
        intermediate_size: default 4 hidden_size. hidden_act: of the MLP.
        gated_mlp: W_2 (act(W_g x) * W_1 x) instead of W_2 act(W_1 x); with hidden_act="silu" it is SwiGLU.
        mlp_bias: whether the MLP's layers have biases.
        norm: "pre" (and one last norm) or "post".
        norm_type: "layer" for LayerNorm or "rms" for RMSNorm.
        final_logit_softcapping: of ``TokenMixForCausalLM``: logits l become cap * tanh(l / cap); None: as they are.
        positions: "learned" or "sinusoidal" vectors added to the embedding, or None.
        is_causal: None: what the class needs, True for ``TokenMixForCausalLM``, False elsewhere. A saved model stays
            of its kind.
        initializer_range: std of embeddings and projections; for those that write to the residual stream it is
            divided by sqrt(2 layers).
        classifier_pooling: what is classified: the "mean" of the valid tokens, the first ("cls") or the "last";
            default "last" if causal, else "mean". Of images: "cls" (default, a class token) or "mean".
        encoder_mixers, encoder_layers, cross_mixers: of ``TokenMixForSeq2SeqLM``: default ``mixers``,
            ``num_hidden_layers`` and softmax attention.
        image_size, patch_size, num_channels, num_register_tokens, stem: of ``TokenMixForImageClassification``;
            image_size is one number or [height, width], stem that of ``ViTConfig``.

    Raises:
        MixerError: for any value that no model can be built from, in one line.
    """

    model_type = "tokenmix"
    keys_to_ignore_at_inference = ["cache", "past_key_values", "encoder_last_hidden_state"]

    vocab_size: int = 256
    hidden_size: int = 256
    intermediate_size: int | None = None
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    hidden_act: str = "gelu"
    mixers: list[Spec] | None = None
    norm: str = "pre"
    norm_type: str = "layer"
    gated_mlp: bool = False
    mlp_bias: bool = True
    final_logit_softcapping: float | None = None
    layer_norm_eps: float = 1e-5
    positions: str | None = "learned"
    is_causal: bool | None = None
    max_position_embeddings: int = 512
    initializer_range: float = 0.02
    hidden_dropout_prob: float = 0.0
    drop_path_rate: float = 0.0
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    classifier_pooling: str | None = None
    classifier_dropout: float | None = None
    encoder_mixers: list[Spec] | None = None
    encoder_layers: int | None = None
    cross_mixers: list[Spec] | None = None
    decoder_start_token_id: int | None = None
    image_size: int | list[int] = 224
    patch_size: int = 16
    num_channels: int = 3
    num_register_tokens: int = 0
    stem: str = "patch"

    def __post_init__(self, **kwargs: object) -> None:
        _refuse_misspelt(kwargs)
        self.mixers = self._spec_list("mixers", [{"name": "aft_simple"}])
        self.encoder_mixers, self.cross_mixers = self._spec_list("encoder_mixers"), self._spec_list("cross_mixers")
        self._check()
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        super().__post_init__(**kwargs)

    def _spec_list(self, field: str, default: list[Spec] | None = None) -> list[Spec] | None:
        """Return a field of specs as a list of dicts, each checked as far as possible without a model."""
        specs = getattr(self, field) if getattr(self, field) is not None else default
        if specs is None:
            return None
        if not isinstance(specs, (list, tuple)) or not specs:
            raise MixerError(f"TokenMixConfig: {field} must be a list of at least one mixer spec, got {specs!r}.")
        for spec in specs:
            complete_spec(spec, 1)
        return [dict(spec) for spec in specs]

    def _check(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            optional = value is None and getattr(type(self), name) is None
            if not optional and not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
                raise MixerError(f"TokenMixConfig: {name} must be a positive integer, got {value!r}.")
        for name, known in CHOICES.items():
            if not any(getattr(self, name) is each or getattr(self, name) == each for each in known):
                choices = ", ".join(repr(each) for each in known)
                raise MixerError(f"TokenMixConfig: {name}={getattr(self, name)!r} is unknown; choose one of {choices}.")
        for name in SHARES:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and 0 <= value < 1):
                raise MixerError(f"TokenMixConfig: {name} must be in [0, 1), got {value!r}.")
        for name in ("initializer_range", "layer_norm_eps", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is None and getattr(type(self), name) is None:
                continue
            if not (isinstance(value, (int, float)) and isfinite(value) and value > 0):
                raise MixerError(f"TokenMixConfig: {name} must be a positive number, got {value!r}.")
        lengths = {"mixers": self.num_hidden_layers, "cross_mixers": self.num_hidden_layers}
        for field, layers in (lengths | {"encoder_mixers": self.encoder_layers}).items():
            specs, most = getattr(self, field) or [], layers or self.num_hidden_layers
            if len(specs) > most:
                held = f"{field} holds {len(specs)} specs for {most} layers"
                raise MixerError(f"TokenMixConfig: {held}; give one for each layer, or fewer, which repeat.")

    @property
    def layer_types(self) -> list[str]:
        """Return the layer types that transformers' ``DynamicCache`` is built by: each layer keeps a mixer's state."""
        return ["tokenmix_state"] * self.num_hidden_layers

    def validate(self) -> None:
        """Check the fields for ``save_pretrained``; transformers' own check refuses our layer type."""
        self._check()

    def specs(self, field: str = "mixers") -> list[Spec]:
        """Return one complete mixer spec per layer, with heads and lengths filled in where a spec leaves them open."""
        context = {"max_context_len": self.max_position_embeddings} if field == "cross_mixers" else {}
        return [
            self._complete_spec(spec, context)
            for spec in cycle_specs(tuple(getattr(self, field)), self.num_hidden_layers)
        ]

    def _complete_spec(self, spec: Spec, context: dict[str, int]) -> Spec:
        known = mixer_options(MIXERS[spec["name"]]) if spec["name"] in MIXERS else {}
        found = {"heads": self.num_attention_heads, **context}
        if "heads" not in spec:
            found["kv_heads"] = self.num_key_value_heads or self.num_attention_heads
        return {name: value for name, value in found.items() if name in known} | spec

    def but(self, **changes: Any) -> TokenMixConfig:
        """Return a copy with some fields changed."""
        new = copy.deepcopy(self)
        for name, value in changes.items():
            setattr(new, name, value)
        return new

    def vit(self) -> ViTConfig:
        """Return the config of our Vision Transformer of the same sizes."""
        mlp = {(False, "gelu"): "gelu", (False, "relu2"): "relu2", (True, "silu"): "swiglu"}.get(
            (self.gated_mlp, self.hidden_act)
        )
        if self.norm != "pre" or mlp is None or not self.mlp_bias or self.classifier_pooling == "last":
            only = "has norm='pre', hidden_act='gelu' or gated 'silu', biases, classifier_pooling='cls' or 'mean'"
            got = f"norm={self.norm!r}, hidden_act={self.hidden_act!r}, classifier_pooling={self.classifier_pooling!r}"
            raise MixerError(f"TokenMixForImageClassification: {only}; got {got}.")
        return ViTConfig(
            dim=self.hidden_size,
            layers=self.num_hidden_layers,
            mixers=tuple(self.specs()),
            image_size=self.image_size,  # type: ignore[arg-type]  # ViTConfig accepts one number
            patch=self.patch_size,
            stem=self.stem,
            channels=self.num_channels,
            classes=self.num_labels or 2,
            mlp_ratio=mlp_ratio(self) * (1.5 if mlp == "swiglu" else 1.0),
            mlp=mlp,  # type: ignore[arg-type]  # one of the kinds
            norm_type=self.norm_type,  # type: ignore[arg-type]  # checked above
            pool="mean" if self.classifier_pooling == "mean" else "class",
            positions=self.positions,
            registers=self.num_register_tokens,
            dropout=self.hidden_dropout_prob,
            drop_path=self.drop_path_rate,
            norm_eps=self.layer_norm_eps,
            init_std=self.initializer_range,
        )

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> tuple[Record, Options]:
        """Read as transformers does, but refuse a checkpoint of another family instead of warning."""
        found, rest = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        kind = found.get("model_type")
        if found and kind != cls.model_type:
            if kind is None and ("model" in found or "kind" in found):
                export = "is of tokenmix itself; `tokenmix export` turns a run into a folder to load"
                raise MixerError(f"{pretrained_model_name_or_path}: {export}.")
            other = f"holds a model of type {kind!r}, not 'tokenmix'"
            raise MixerError(f"{pretrained_model_name_or_path}: {other}; transformers' AutoModel classes load it.")
        return found, rest


def mlp_ratio(config: TokenMixConfig) -> float:
    """Return the ratio that gives ``Block`` exactly ``intermediate_size``; the 0.5 guards against rounding down."""
    return ((config.intermediate_size or 4 * config.hidden_size) + 0.5) / config.hidden_size


def _refuse_misspelt(kwargs: Options) -> None:
    """Refuse an unknown argument that is nearly a field; transformers would keep it as an attribute."""
    ours = [f.name for f in fields(TokenMixConfig) if f.name in TokenMixConfig.__annotations__]
    for name in kwargs:
        near = difflib.get_close_matches(name, ours, n=1, cutoff=0.8)
        if near:
            raise MixerError(f"TokenMixConfig: has no field {name!r}; nearest: {near[0]}.")
