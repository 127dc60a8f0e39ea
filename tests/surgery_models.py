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


def gpt2(**options: Any) -> nn.Module:
    return tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, **options))


def llama(**options: Any) -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**(GROUPED | options)))


def mistral(sliding_window: int | None = None) -> nn.Module:
    return tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=sliding_window))


def qwen2() -> nn.Module:
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED))


def vit() -> nn.Module:
    return tf.ViTForImageClassification(tf.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=5))


def timm_vit(**options: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=2, embed_dim=32, num_heads=4, img_size=32, patch_size=8, num_classes=5, **options)


def detr() -> nn.Module:
    backbone = tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"])
    return tf.DetrModel(tf.DetrConfig(d_model=32, num_queries=5, use_timm_backbone=False, backbone_config=backbone, **DETR))


def transformer() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Transformer(32, 4, 2, 2, 48, batch_first=True)


ENCODERS = {"bert": bert, "roberta": roberta, "xlm_roberta": xlm_roberta, "camembert": camembert, "electra": electra}
DECODERS = {"gpt2": gpt2, "llama": llama, "mistral": mistral, "qwen2": qwen2}
IMAGES = {"vit": vit, "timm": timm_vit}
MAKERS = ENCODERS | DECODERS | IMAGES | {"bert_decoder": bert_decoder, "detr": detr, "transformer": transformer}


@cache
def shared(name: str, std: float = 0.5) -> Any:
    """``make``, once per name: for tests that leave the model as it is."""
    return make(name, std)


def make(name: str, std: float = 0.5, **options: Any) -> Any:
    """The model in eval mode, its matrices drawn with that std; norms keep their weights."""
    torch.manual_seed(0)
    model = MAKERS[name](**options)
    for p in model.parameters():
        if p.ndim >= 2:
            nn.init.normal_(p, std=std)
        elif bool((p == 0).all()):
            nn.init.normal_(p, std=std / 4)
    return model.eval()


def padded(side: str, batch: int = 3, length: int = 9) -> tuple[Tensor, Tensor]:
    """Token numbers and their mask; the rows are ``length``, two and four shorter."""
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 60, (batch, length)), torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        cut = slice(0, 2 * row) if side == "left" else slice(length - 2 * row, length)
        ids[row, cut], mask[row, cut] = 0, 0
    return ids, mask
