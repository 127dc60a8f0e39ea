"""Export a run as a Hugging Face folder.

It holds weights, config, tokenizer or image processor, generation defaults and a model card.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from ...hosts.huggingface import TokenMixForImageClassification, to_transformers
from ...models.saved import pick_step
from ...system.files import check_out, new_folder, write_json
from ...types import Record
from ..train.rundir import RunDir
from ..train.runs import load_run
from ..train.subword_task import TOKENIZER
from ..train.tasks import task_of
from .card import Facts, model_card
from .processors import CROPPED_FROM, byte_tokenizer, image_processor, subword_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def export_run(run: Path | str, out: Path | str, *, step: int | str = "last") -> Path:
    """Write a run's model to the new folder ``out``, completely or not at all.

    ``AutoModelForCausalLM``, ``AutoModelForMaskedLM``, ``AutoModelForSequenceClassification``,
    ``AutoModelForSeq2SeqLM`` or ``AutoModelForImageClassification`` loads it.

    Args:
        run: the directory of a language model, an encoder, an encoder-decoder or a Vision Transformer.
        step: of its checkpoints: a number, "last" or "best".

    Raises:
        MixerError: for another kind of model, and if the new model's logits differ from the run's.
    """
    check_out(out, "folder")
    model, config = load_run(run, step=step)
    opened = RunDir.open(run)
    new = to_transformers(model)
    files: dict[str, Record] = {}
    own: Any = model.config
    if isinstance(new, TokenMixForImageClassification) and min(own.image_size) < CROPPED_FROM:
        files["preprocessor_config.json"] = image_processor(own, config.data)  # type: ignore[arg-type]  # of images
    task = task_of(config)
    if labels := task.label_names(opened.path):
        new.config.id2label = dict(enumerate(labels))
        new.config.label2id = {label: i for i, label in enumerate(labels)}
    as_bytes = task.tokens == "bytes" and own.vocab == 256
    facts = Facts(opened, config, pick_step(opened.path, step), new, byte_tokens=as_bytes)
    _write(Path(out), new, facts, files)
    return Path(out)


def _write(out: Path, model: PreTrainedModel, facts: Facts, files: dict[str, Record]) -> None:
    """Write everything into the new folder."""
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with new_folder(out, "folder") as folder:
            model.save_pretrained(folder)
            if facts.byte_tokens:
                byte_tokenizer(facts.model.config.max_position_embeddings).save_pretrained(folder)
            if facts.subwords:
                longest = facts.config.data.max_tokens  # type: ignore[attr-defined]  # of texts in subwords
                text = (facts.run.path / TOKENIZER).read_text()
                subword_tokenizer(text, longest, facts.config.model.kind).save_pretrained(folder)
            for name, content in files.items():
                write_json(folder / name, content)
            (folder / "README.md").write_text(model_card(facts, out.name))
    finally:
        if bar:
            logging.enable_progress_bar()
