"""Tiny models of every family that the surgery knows, with random weights of std 0.5, and inputs for them."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix._torchvision import ensure_torchvision

ensure_torchvision()

import timm  # noqa: E402  (torchvision first)
import transformers as tf  # noqa: E402

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = SMALL | {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GROUPED = TEXT | {"num_key_value_heads": 2, "max_position_embeddings": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48, "vocab_size": 60, "bos_token_id": 1, "eos_token_id": None}
SEQ2SEQ = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48}
SEQ2SEQ |= {"decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "vocab_size": 60}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 20, "suppress_tokens": None, "begin_suppress_tokens": None}
IMAGE = SMALL | {"image_size": 32, "patch_size": 8}
DETR = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}


def bert(**options: Any) -> nn.Module:
    return tf.BertModel(tf.BertConfig(**TEXT, max_position_embeddings=40, **options))


def bert_decoder() -> nn.Module:
    return tf.BertLMHeadModel(tf.BertConfig(**TEXT, max_position_embeddings=40, is_decoder=True, add_cross_attention=True))


def roberta() -> nn.Module:
    return tf.RobertaModel(tf.RobertaConfig(**TEXT, max_position_embeddings=42))


def xlm_roberta() -> nn.Module:
    return tf.XLMRobertaModel(tf.XLMRobertaConfig(**TEXT, max_position_embeddings=42))


def camembert() -> nn.Module:
    return tf.CamembertModel(tf.CamembertConfig(**TEXT, max_position_embeddings=42))


def electra() -> nn.Module:
    return tf.ElectraModel(tf.ElectraConfig(**TEXT, embedding_size=16, max_position_embeddings=40))


def ernie() -> nn.Module:
    return tf.ErnieModel(tf.ErnieConfig(**TEXT, max_position_embeddings=40))


def data2vec_text() -> nn.Module:
    return tf.Data2VecTextModel(tf.Data2VecTextConfig(**TEXT, max_position_embeddings=42))


def distilbert() -> nn.Module:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 60, "max_position_embeddings": 40}
    return tf.DistilBertModel(tf.DistilBertConfig(**sizes))


def clip_text() -> nn.Module:
    return tf.CLIPTextModel(tf.CLIPTextConfig(**TEXT | {"eos_token_id": 2}, max_position_embeddings=40))


def siglip_text() -> nn.Module:
    return tf.SiglipTextModel(tf.SiglipTextConfig(**TEXT, max_position_embeddings=40))


def gpt2(**options: Any) -> nn.Module:
    return tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, **options))


def llama(**options: Any) -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**(GROUPED | options)))


def mistral(sliding_window: int | None = None) -> nn.Module:
    return tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=sliding_window))


def qwen2() -> nn.Module:
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED))


def mixtral() -> nn.Module:
    return tf.MixtralForCausalLM(tf.MixtralConfig(**GROUPED, num_local_experts=2))


def gemma() -> nn.Module:
    return tf.GemmaForCausalLM(tf.GemmaConfig(**GROUPED, head_dim=8))


def granite() -> nn.Module:
    return tf.GraniteForCausalLM(tf.GraniteConfig(**GROUPED, attention_multiplier=0.2))


def qwen2_moe() -> nn.Module:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return tf.Qwen2MoeForCausalLM(tf.Qwen2MoeConfig(**GROUPED, **experts))


def qwen3() -> nn.Module:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED, head_dim=8))


def qwen3_moe() -> nn.Module:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    return tf.Qwen3MoeForCausalLM(tf.Qwen3MoeConfig(**GROUPED, **experts, head_dim=8))


def opt() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": 60, "max_position_embeddings": 48}
    return tf.OPTForCausalLM(tf.OPTConfig(**sizes, word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=None))


def bart() -> nn.Module:
    return tf.BartForConditionalGeneration(tf.BartConfig(**SEQ2SEQ, max_position_embeddings=40))


def mbart() -> nn.Module:
    return tf.MBartForConditionalGeneration(tf.MBartConfig(**SEQ2SEQ, max_position_embeddings=40))


def marian() -> nn.Module:
    return tf.MarianMTModel(tf.MarianConfig(**SEQ2SEQ, max_position_embeddings=40))


def pegasus() -> nn.Module:
    return tf.PegasusForConditionalGeneration(tf.PegasusConfig(**SEQ2SEQ, max_position_embeddings=40))


def m2m_100() -> nn.Module:
    return tf.M2M100ForConditionalGeneration(tf.M2M100Config(**SEQ2SEQ, max_position_embeddings=40))


def whisper() -> nn.Module:
    return tf.WhisperForConditionalGeneration(tf.WhisperConfig(**SEQ2SEQ, **WHISPER))


def vit() -> nn.Module:
    return tf.ViTForImageClassification(tf.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=5))


def deit() -> nn.Module:
    return tf.DeiTForImageClassification(tf.DeiTConfig(**IMAGE, num_labels=5))


def vit_msn() -> nn.Module:
    return tf.ViTMSNForImageClassification(tf.ViTMSNConfig(**IMAGE, num_labels=5))


def ijepa() -> nn.Module:
    return tf.IJepaForImageClassification(tf.IJepaConfig(**IMAGE, num_labels=5))


def dinov2() -> nn.Module:
    return tf.Dinov2ForImageClassification(tf.Dinov2Config(**IMAGE, mlp_ratio=2, num_labels=5))


def dinov2_registers() -> nn.Module:
    return tf.Dinov2WithRegistersForImageClassification(tf.Dinov2WithRegistersConfig(**IMAGE, mlp_ratio=2, num_register_tokens=3, num_labels=5))


def clip_vision() -> nn.Module:
    return tf.CLIPVisionModel(tf.CLIPVisionConfig(**IMAGE))


def siglip_vision() -> nn.Module:
    return tf.SiglipVisionModel(tf.SiglipVisionConfig(**IMAGE, vision_use_head=False))


def timm_vit(**options: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=32, num_heads=4, img_size=32, patch_size=8, num_classes=5, **options)


def timm_normed() -> nn.Module:
    return timm_vit(qk_norm=True)


def detr() -> nn.Module:
    backbone = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"])
    return tf.DetrModel(tf.DetrConfig(d_model=32, num_queries=5, use_timm_backbone=False, backbone_config=backbone, **DETR))


def transformer() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Transformer(32, 4, 2, 2, 48, batch_first=True)


ENCODERS = {"bert": bert, "roberta": roberta, "xlm_roberta": xlm_roberta, "camembert": camembert, "electra": electra}
ENCODERS |= {"ernie": ernie, "data2vec_text": data2vec_text, "distilbert": distilbert, "clip_text": clip_text, "siglip_text": siglip_text}
DECODERS = {"gpt2": gpt2, "llama": llama, "mistral": mistral, "mixtral": mixtral, "qwen2": qwen2, "qwen2_moe": qwen2_moe}
DECODERS |= {"qwen3": qwen3, "qwen3_moe": qwen3_moe, "gemma": gemma, "granite": granite, "opt": opt}
TRANSLATORS = {"bart": bart, "mbart": mbart, "marian": marian, "pegasus": pegasus, "m2m_100": m2m_100, "whisper": whisper}
IMAGES = {"vit": vit, "deit": deit, "vit_msn": vit_msn, "ijepa": ijepa, "dinov2": dinov2, "dinov2_registers": dinov2_registers}
IMAGES |= {"clip_vision": clip_vision, "siglip_vision": siglip_vision, "timm": timm_vit, "timm_normed": timm_normed}
MAKERS = ENCODERS | DECODERS | TRANSLATORS | IMAGES | {"bert_decoder": bert_decoder, "detr": detr, "transformer": transformer}


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
