"""Make the inputs of an exported model: a byte tokenizer, and the file of an image processor."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from ...models import ViTConfig
from ...types import Record
from ..data.augment import moments
from ..data.subwords import END, MASK, PAD, SPECIAL, START

CROPPED_FROM = 224
"""Image side from which evaluation also crops; an image processor's file cannot describe that."""


def byte_tokenizer(max_len: int) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose token i is byte i of the text in UTF-8.

    There are no special tokens, because all 256 ids are taken.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={_letter(byte): byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_len,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=names,
    )


FORMS = {
    "seq2seq": (f"$A {SPECIAL[END]}", None),
    "lm": (f"{SPECIAL[START]} $A", None),
    "encoder": (f"{SPECIAL[START]} $A {SPECIAL[END]}", f"{SPECIAL[START]} $A {SPECIAL[END]} $B {SPECIAL[END]}"),
}
"""What each kind of model reads of a text, and of a pair of texts."""


def subword_tokenizer(json: str, max_len: int, kind: str) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a run on texts in subwords from its ``tokenizer.json``.

    It starts and ends texts as the run did, pads on the right, and takes ``<mask>`` in a text for the token.

    Args:
        kind: of the model, one of ``FORMS``.
    """
    from tokenizers import Tokenizer, processors

    tokenizer, (single, pair) = Tokenizer.from_str(json), FORMS[kind]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(SPECIAL[START], START), (SPECIAL[END], END)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_len,
        pad_token=SPECIAL[PAD],
        bos_token=SPECIAL[START],
        eos_token=SPECIAL[END],
        mask_token=SPECIAL[MASK],
        model_input_names=["input_ids", "attention_mask"],
    )


def _letter(byte: int) -> str:
    """Return the letter for a byte in byte-level vocabularies: itself if printable, else the next one from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte if byte in plain else 256 + sum(other not in plain for other in range(byte)))


def image_processor(model: ViTConfig, data: Any) -> Record:
    """Return preprocessor_config.json: resized, bicubic, and normalised as in the run's evaluation."""
    mean, std = moments("export", model.channels, data.mean, data.std)
    size = {"height": model.image_size[0], "width": model.image_size[1]}
    pixels = {
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
    }
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": model.channels == 3,
        "do_resize": True,
        "size": size,
        "resample": 3,
        **pixels,
    }
