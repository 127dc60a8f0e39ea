"""Write the model card of an exported run: what it is, its data, its results, and how to load it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...models.card import front_matter
from ..train.config import RunConfig
from ..train.label_task import read_labels
from ..train.rundir import RunDir
from ..train.tasks import task_of
from .processors import CROPPED_FROM, image_processor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


USE = {
    "lm": """```python
import torch
import tokenmix.hosts.huggingface  # registers the model with transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
{ids}
out = model.generate(ids, max_new_tokens=100, do_sample=True, temperature=0.8)
{text}
```""",
    "seq2seq": """```python
import tokenmix.hosts.huggingface  # registers the model with transformers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer, model = (cls.from_pretrained("{name}") for cls in (AutoTokenizer, AutoModelForSeq2SeqLM))
batch = tokenizer(["..."], return_tensors="pt")
out = model.generate(**batch, max_new_tokens={longest}, num_beams=5)
print(tokenizer.decode(out[0], skip_special_tokens=True).strip())
```""",
    "encoder": """```python
import tokenmix.hosts.huggingface  # registers the model with transformers
from transformers import pipeline

fill = pipeline("fill-mask", "{name}")
print(fill("... <mask> ..."))
```""",
    "labels": """```python
import tokenmix.hosts.huggingface  # registers the model with transformers
from transformers import pipeline

classify = pipeline("text-classification", "{name}")
print(classify({given}))
```""",
    "ids": """```python
import torch
import tokenmix.hosts.huggingface  # registers the model with transformers
from transformers import {auto}

model = {auto}.from_pretrained("{name}")
print(model(torch.tensor([[1, 2, 3]])).logits)  # ids in 0..{last}
```""",
    "vit": """```python
import torch
import tokenmix.hosts.huggingface  # registers the model with transformers
from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("{name}")
logits = model(torch.zeros(1, {channels}, {height}, {width})).logits  # normalised images
```""",
}
BYTES = (
    'tokenizer = AutoTokenizer.from_pretrained("{name}")\nids = tokenizer("To be", return_tensors="pt").input_ids',
    "print(tokenizer.decode(out[0]))",
)
KINDS = {
    "lm": ("text-generation", "language model"),
    "encoder": ("fill-mask", "masked language model (encoder)"),
    "labels": ("text-classification", "classifier of texts (encoder)"),
    "ids": (None, "encoder of sequences of ids"),
    "seq2seq": ("text2text-generation", "encoder-decoder"),
    "vit": ("image-classification", "image classifier (Vision Transformer)"),
}
"""Task of model hubs, if there is one, and name of each kind of model."""
PLAIN = ("ids = torch.tensor([[1, 2, 3]])  # token ids in 0..{last}", "print(out[0].tolist())")


@dataclass(frozen=True)
class Facts:
    """Hold what a card states: run, config, step, the new model, and whether its tokens are bytes."""

    run: RunDir
    config: RunConfig
    step: int
    model: PreTrainedModel
    byte_tokens: bool

    @property
    def kind(self) -> str:
        """Return the kind of model for ``KINDS``: encoders are told apart by what their task does with texts."""
        kind, writes = self.config.model.kind, task_of(self.config).writes
        return {"classify": "labels", "fill": "encoder"}.get(writes, "ids") if kind == "encoder" else kind

    @property
    def subwords(self) -> bool:
        """Return whether the run has a tokenizer of subwords."""
        return task_of(self.config).tokens == "subwords"


def model_card(facts: Facts, name: str) -> str:
    """Return README.md with the front matter that model hubs read."""
    config: Any = facts.config
    mixers = [spec["name"] for spec in config.model.specs()]
    named = ", ".join(f"{mixers.count(m)} x {m}" for m in dict.fromkeys(mixers))
    task, what = KINDS[facts.kind]
    size = sum(p.numel() for p in facts.model.parameters())
    front = front_matter("transformers", task, ["tokenmix", *mixers])
    what = "language model over bytes" if facts.byte_tokens else what
    about = f"{'An' if what[0] in 'aeiou' else 'A'} {what}"
    about += f" of {size:,} parameters, {config.model.dim} features, layers: {named}."
    about += f" Step {facts.step} of a tokenmix run."
    parts = [front, f"# {name}", about, *_numbers(facts), *_data(facts)]
    parts += ["## Use", "`pip install 'tokenmix[hf]'`, then:", _use(facts, name), *_notes(facts)]
    settings = json.dumps(config.to_json(), indent=1)
    return "\n\n".join([*parts, "## Config of the run", f"```json\n{settings}\n```"]) + "\n"


def _numbers(facts: Facts) -> list[str]:
    """Return the last evaluation of each split up to the step."""
    scored = [line for line in facts.run.read_metrics() if line.get("kind") == "eval" and line["step"] <= facts.step]
    last = {line["split"]: line for line in scored}
    if not last:
        return ["## Numbers", "This run was not evaluated."]
    skipped = ("kind", "split", "seconds")
    columns = [key for key in next(iter(last.values())) if key not in skipped]
    rows = [
        f"| {split} | " + " | ".join(_cell(line.get(key)) for key in columns) + " |" for split, line in last.items()
    ]
    head = "| split | " + " | ".join(columns) + " |"
    return ["## Numbers", "\n".join([head, "|---" * (len(columns) + 1) + "|", *rows])]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, dict):
        return ", ".join(f"{each} {name}" for name, each in value.items())
    text = " x ".join(str(n) for n in value) if isinstance(value, (list, tuple)) else str(value)
    return text.replace("|", "\\|")  # a bar would end the cell of a table


def _data(facts: Facts) -> list[str]:
    env, data = facts.run.env(), facts.config.data
    found = env.get("corpus") or env.get("images") or env.get("synthetic") or env.get("texts") or {}
    name = found["name"] if "name" in found else getattr(data, "source", data.kind)
    known = ", ".join(f"{key} {_cell(value)}" for key, value in found.items() if key != "name")
    about = f"{name}" + (f": {known}." if known else ".")
    if task_of(facts.config).tokens == "characters":
        return ["## Data", f"Synthetic sequences. {about}"]
    return ["## Data", f"{about} Whoever redistributes the model must check the data's licence."]


def _use(facts: Facts, name: str) -> str:
    model: Any = facts.config.model
    if model.kind == "vit":
        return USE["vit"].format(
            name=name, channels=model.channels, height=model.image_size[0], width=model.image_size[1]
        )
    if facts.kind == "seq2seq":
        return USE["seq2seq"].format(name=name, longest=facts.config.data.max_tokens)  # type: ignore[attr-defined]  # pairs have it
    if facts.kind == "ids":
        auto = type(facts.model).__name__.replace("TokenMix", "AutoModel")
        return USE["ids"].format(name=name, auto=auto, last=model.vocab - 1)
    if facts.kind in ("encoder", "labels"):
        pairs = facts.kind == "labels" and read_labels(facts.run.path).texts > 1
        given = '{"text": "...", "text_pair": "..."}' if pairs else '"..."'
        return USE[facts.kind].format(name=name, given=given)
    ids, text = BYTES if facts.byte_tokens or facts.subwords else PLAIN
    return USE["lm"].format(name=name, ids=ids.format(name=name, last=model.vocab - 1), text=text)


def _notes(facts: Facts) -> list[str]:
    model: Any = facts.config.model
    if model.kind == "vit":
        how = image_processor(model, facts.config.data)
        cropped = "resized, bicubic, to 1 / 0.875 of that, and cropped at the centre"
        sized = "resized, bicubic" if min(model.image_size) < CROPPED_FROM else cropped
        size = " x ".join(str(n) for n in model.image_size)
        pixels = f"Images are {sized} ({size}), in 0..1, minus {how['image_mean']}, divided by {how['image_std']}."
        return [pixels]
    if facts.subwords:
        ends = {"seq2seq": "ends each with its end token", "lm": "begins each with its start token"}
        does = ends.get(model.kind, "puts each between its start and its end token")
        return [f"Texts are cut into subwords by the tokenizer of the folder, which {does}."]
    notes = [f"{'Sequences' if facts.kind == 'ids' else 'Texts'} of up to {model.max_len} tokens."]
    if facts.byte_tokens:
        notes.append(
            "A token is a byte of the text in UTF-8. All 256 ids are taken, so none is left for padding: "
            "pad on the left with any id and pass an attention_mask."
        )
    return [" ".join(notes)]
