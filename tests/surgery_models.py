"""Tiny models of every family that the surgery knows, with random weights of std 0.5, and inputs for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import timm
import torch
import transformers as tf
from torch import Tensor, nn

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = SMALL | {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GROUPED = TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 48,
    "vocab_size": 60,
    "bos_token_id": 1,
    "eos_token_id": None,
}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
}
SEQ2SEQ |= {
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "vocab_size": 60,
}
WHISPER = {
    "num_mel_bins": 8,
    "max_source_positions": 12,
    "max_target_positions": 20,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
IMAGE = SMALL | {"image_size": 32, "patch_size": 8, "num_labels": 5}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 60, "max_position_embeddings": 40}
OPT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "vocab_size": 60,
    "max_position_embeddings": 48,
}
OPT |= {"word_embed_proj_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
EUROBERT = GROUPED | {"mask_token_id": 4}
GEMMA3 = {
    "head_dim": 8,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 32,
}
MODERNBERT = {
    **SMALL,
    "vocab_size": 60,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DETR = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 60,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
}
MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 4, "mamba_expand": 2}
FALCON = {"head_dim": 8, "mamba_d_state": 4, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}


def built(model: type, config: type, **sizes: Any) -> Callable[..., nn.Module]:
    """How to build a model of transformers; what is given later stands over the sizes."""
    return lambda **options: model(config(**(sizes | options)))


def timm_vit(**options: Any) -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", depth=2, embed_dim=32, num_heads=4, img_size=32, patch_size=8, num_classes=5, **options
    )


def detr() -> nn.Module:
    backbone = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"])
    return tf.DetrModel(
        tf.DetrConfig(d_model=32, num_queries=5, use_timm_backbone=False, backbone_config=backbone, **DETR)
    )


def transformer() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Transformer(32, 4, 2, 2, 48, batch_first=True)


SHORT, SHIFTED = (
    TEXT | {"max_position_embeddings": 40},
    TEXT | {"max_position_embeddings": 42},
)  # the latter count from the padding token's number
ENCODERS = {
    "bert": built(tf.BertModel, tf.BertConfig, **SHORT),
    "roberta": built(tf.RobertaModel, tf.RobertaConfig, **SHIFTED),
    "xlm_roberta": built(tf.XLMRobertaModel, tf.XLMRobertaConfig, **SHIFTED),
    "camembert": built(tf.CamembertModel, tf.CamembertConfig, **SHIFTED),
    "electra": built(tf.ElectraModel, tf.ElectraConfig, **SHORT, embedding_size=16),
    "ernie": built(tf.ErnieModel, tf.ErnieConfig, **SHORT),
    "data2vec_text": built(tf.Data2VecTextModel, tf.Data2VecTextConfig, **SHIFTED),
    "distilbert": built(tf.DistilBertModel, tf.DistilBertConfig, **DISTILBERT),
    "modernbert": built(
        tf.ModernBertModel,
        tf.ModernBertConfig,
        **MODERNBERT,
        max_position_embeddings=64,
        local_attention=8,
        global_attn_every_n_layers=2,
    ),
    "deberta_v2": built(tf.DebertaV2Model, tf.DebertaV2Config, **SHORT),
    "eurobert": built(tf.EuroBertModel, tf.EuroBertConfig, **EUROBERT),
    "embedding_gemma": built(
        tf.Gemma3TextModel,
        tf.Gemma3TextConfig,
        **GROUPED,
        **GEMMA3 | {"sliding_window": 8},
        use_bidirectional_attention=True,
    ),
    "clip_text": built(tf.CLIPTextModel, tf.CLIPTextConfig, **SHORT | {"eos_token_id": 2}),
    "siglip_text": built(tf.SiglipTextModel, tf.SiglipTextConfig, **SHORT),
}
DECODERS = {
    "gpt2": built(tf.GPT2LMHeadModel, tf.GPT2Config, **GPT2),
    "llama": built(tf.LlamaForCausalLM, tf.LlamaConfig, **GROUPED),
    "mistral": built(tf.MistralForCausalLM, tf.MistralConfig, **GROUPED, sliding_window=None),
    "mixtral": built(tf.MixtralForCausalLM, tf.MixtralConfig, **GROUPED, num_local_experts=2),
    "qwen2": built(tf.Qwen2ForCausalLM, tf.Qwen2Config, **GROUPED),
    "qwen2_moe": built(
        tf.Qwen2MoeForCausalLM, tf.Qwen2MoeConfig, **GROUPED, **EXPERTS, shared_expert_intermediate_size=16
    ),
    "qwen3": built(tf.Qwen3ForCausalLM, tf.Qwen3Config, **GROUPED, head_dim=8),
    "qwen3_moe": built(tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig, **GROUPED, **EXPERTS, head_dim=8),
    "gemma": built(tf.GemmaForCausalLM, tf.GemmaConfig, **GROUPED, head_dim=8),
    "gemma3": built(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, **GROUPED, **GEMMA3),
    "gemma2": built(
        tf.Gemma2ForCausalLM,
        tf.Gemma2Config,
        **GROUPED,
        head_dim=8,
        query_pre_attn_scalar=8,
        sliding_window=32,
        attn_logit_softcapping=None,
    ),
    "jamba": built(
        tf.JambaForCausalLM,
        tf.JambaConfig,
        **GROUPED | {"num_hidden_layers": 4},
        **MAMBA,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
    ),
    "bamba": built(
        tf.BambaForCausalLM,
        tf.BambaConfig,
        **GROUPED | {"num_hidden_layers": 4},
        **MAMBA,
        attn_layer_indices=[1, 3],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_n_groups=1,
    ),
    "falcon_h1": built(
        tf.FalconH1ForCausalLM, tf.FalconH1Config, **GROUPED, **FALCON, mamba_n_groups=1, key_multiplier=0.5
    ),
    "smollm3": built(tf.SmolLM3ForCausalLM, tf.SmolLM3Config, **GROUPED, no_rope_layers=[1, 0]),
    "arcee": built(tf.ArceeForCausalLM, tf.ArceeConfig, **GROUPED),
    "granite_moe": built(
        tf.GraniteMoeForCausalLM,
        tf.GraniteMoeConfig,
        **GROUPED,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_multiplier=0.2,
    ),
    "granite": built(tf.GraniteForCausalLM, tf.GraniteConfig, **GROUPED, attention_multiplier=0.2),
    "starcoder2": built(tf.Starcoder2ForCausalLM, tf.Starcoder2Config, **GROUPED, sliding_window=None),
    "stablelm": built(tf.StableLmForCausalLM, tf.StableLmConfig, **GROUPED),
    "phi": built(tf.PhiForCausalLM, tf.PhiConfig, **GROUPED),
    "phi3": built(tf.Phi3ForCausalLM, tf.Phi3Config, **GROUPED),
    "gpt_neox": built(tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, **TEXT, max_position_embeddings=64),
    "biogpt": built(tf.BioGptForCausalLM, tf.BioGptConfig, **TEXT, max_position_embeddings=48),
    "opt": built(tf.OPTForCausalLM, tf.OPTConfig, **OPT),
}
TRANSLATORS = {
    "t5": built(tf.T5ForConditionalGeneration, tf.T5Config, **T5),
    "mt5": built(tf.MT5ForConditionalGeneration, tf.MT5Config, **T5, tie_word_embeddings=False),
    "bart": built(tf.BartForConditionalGeneration, tf.BartConfig, **SEQ2SEQ, max_position_embeddings=40),
    "mbart": built(tf.MBartForConditionalGeneration, tf.MBartConfig, **SEQ2SEQ, max_position_embeddings=40),
    "marian": built(tf.MarianMTModel, tf.MarianConfig, **SEQ2SEQ, max_position_embeddings=40),
    "pegasus": built(tf.PegasusForConditionalGeneration, tf.PegasusConfig, **SEQ2SEQ, max_position_embeddings=40),
    "m2m_100": built(tf.M2M100ForConditionalGeneration, tf.M2M100Config, **SEQ2SEQ, max_position_embeddings=40),
    "plbart": built(tf.PLBartForConditionalGeneration, tf.PLBartConfig, **SEQ2SEQ, max_position_embeddings=40),
    "blenderbot": built(
        tf.BlenderbotForConditionalGeneration, tf.BlenderbotConfig, **SEQ2SEQ, max_position_embeddings=40
    ),
    "blenderbot_small": built(
        tf.BlenderbotSmallForConditionalGeneration, tf.BlenderbotSmallConfig, **SEQ2SEQ, max_position_embeddings=40
    ),
    "whisper": built(tf.WhisperForConditionalGeneration, tf.WhisperConfig, **SEQ2SEQ, **WHISPER),
}
IMAGES = {
    "vit": built(tf.ViTForImageClassification, tf.ViTConfig, **IMAGE),
    "deit": built(tf.DeiTForImageClassification, tf.DeiTConfig, **IMAGE),
    "vit_msn": built(tf.ViTMSNForImageClassification, tf.ViTMSNConfig, **IMAGE),
    "ijepa": built(tf.IJepaForImageClassification, tf.IJepaConfig, **IMAGE),
    "dinov2": built(tf.Dinov2ForImageClassification, tf.Dinov2Config, **IMAGE, mlp_ratio=2),
    "dinov2_registers": built(
        tf.Dinov2WithRegistersForImageClassification,
        tf.Dinov2WithRegistersConfig,
        **IMAGE,
        mlp_ratio=2,
        num_register_tokens=3,
    ),
    "clip_vision": built(tf.CLIPVisionModel, tf.CLIPVisionConfig, **IMAGE),
    "siglip_vision": built(tf.SiglipVisionModel, tf.SiglipVisionConfig, **IMAGE, vision_use_head=False),
    "timm": timm_vit,
    "timm_normed": partial(timm_vit, qk_norm=True),
}
OTHERS = {
    "bert_decoder": built(tf.BertLMHeadModel, tf.BertConfig, **SHORT, is_decoder=True, add_cross_attention=True),
    "gpt2_decoder": built(tf.GPT2LMHeadModel, tf.GPT2Config, **GPT2, add_cross_attention=True),
    "detr": detr,
    "transformer": transformer,
}
MAKERS: dict[str, Callable[..., nn.Module]] = ENCODERS | DECODERS | TRANSLATORS | IMAGES | OTHERS


@cache
def shared(name: str, std: float = 0.5) -> Any:
    """``make``, once per name: for tests that leave the model as it is."""
    return make(name, std)


def make(name: str, std: float = 0.5, **options: Any) -> Any:
    """The model in eval mode, its matrices drawn with that std; norms keep their weights."""
    torch.manual_seed(0)
    model = MAKERS[name](**options)
    for n, p in model.named_parameters():
        if p.ndim >= 2:
            nn.init.normal_(p, std=std)
        elif bool((p == 0).all()):
            nn.init.normal_(p, std=std / 4)
        elif "q_norm" in n or "k_norm" in n:
            nn.init.uniform_(p, 0.5, 2.0)
    return model.eval()


def padded(side: str, batch: int = 3, length: int = 9) -> tuple[Tensor, Tensor]:
    """Token numbers and their mask; the rows are ``length``, two and four shorter."""
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 60, (batch, length)), torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        cut = slice(0, 2 * row) if side == "left" else slice(length - 2 * row, length)
        ids[row, cut], mask[row, cut] = 0, 0
    return ids, mask
