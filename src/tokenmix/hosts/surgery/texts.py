"""Score text and continue it with a folder of `tokenmix convert` or of transformers, by the folder's own tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...models.sampling import check_sampling
from ...system.files import read_json
from ...types import Options
from .ports import token_limit
from .quality import measure_quality, predicts_next
from .save_load import host_config, load_converted, open_host

WINDOW, ROWS = 128, 8
TOKENS = 50
VOCABULARIES = ("tokenizer.json", "vocab.*", "*.model")
"""The files of which most tokenizers have one at least."""


@dataclass(frozen=True)
class Score:
    """Hold a perplexity, over how many predicted tokens, in windows of how many."""

    perplexity: float
    tokens: int
    window: int

    def text(self) -> str:
        """Format the score."""
        return f"perplexity {self.perplexity:,.2f} over {self.tokens:,} tokens, in windows of {self.window}"


def folder_tokenizer(who: str, folder: Path) -> Any:
    """Load the tokenizer of a host's folder."""
    try:
        import transformers
    except ImportError:
        raise MixerError(f"{who}: {folder}: is a model of transformers: pip install 'tokenmix[hf]'.") from None
    if not _has_vocabulary(transformers, folder):  # transformers would build one without words
        known = ", ".join(VOCABULARIES)
        raise MixerError(f"{who}: {folder} holds no tokenizer ({known}); save one, tokenizer.save_pretrained(folder).")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, config=host_config(folder), local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as why:
        said = " ".join(str(why).split())[:160]
        fix = "save the model's own there, tokenizer.save_pretrained(folder)"
        raise MixerError(f"{who}: {folder} holds no tokenizer that transformers can load ({said}); {fix}.") from None


def _has_vocabulary(transformers: ModuleType, folder: Path) -> bool:
    """Return whether a folder has the files of its tokenizer; that of bytes, as ByT5's, has none to have."""
    if any(any(folder.glob(pattern)) for pattern in VOCABULARIES):
        return True
    config = folder / "tokenizer_config.json"
    named = read_json(config).get("tokenizer_class") if config.is_file() else None
    try:
        files = getattr(transformers, str(named)).vocab_files_names.values()
    except (AttributeError, ImportError):  # no such class, or one that needs a package
        return False
    return not files or any((folder / file).is_file() for file in files)


def text_tokens(who: str, folder: Path, data: Path, max_bytes: int | None = None) -> Tensor:
    """Return the token numbers of a UTF-8 text file, by the tokenizer of a host's folder, without special tokens."""
    if max_bytes is not None and max_bytes < 1:
        raise MixerError(f"{who}: --max-bytes must be >= 1, got {max_bytes}.")
    tokenizer = folder_tokenizer(who, folder)
    try:
        raw = data.read_bytes()
        text = raw.decode() if max_bytes is None else raw[:max_bytes].decode(errors="ignore")
    except OSError as why:
        raise MixerError(f"{who}: --data {data}: cannot be read ({why.strerror or why}); give a text file.") from None
    except UnicodeDecodeError as why:
        raise MixerError(f"{who}: --data {data}: is not UTF-8 text ({why}).") from None
    lines = tokenizer(text.splitlines(keepends=True), add_special_tokens=False)["input_ids"] if text.strip() else []
    return torch.tensor([i for line in lines for i in line], dtype=torch.long, device="cpu")


def check_vocabulary(who: str, folder: Path, model: Any, ids: Tensor) -> None:
    """Refuse tokens that the model has no embedding for: its folder holds another model's tokenizer."""
    known = int(model.get_input_embeddings().weight.shape[0])
    if ids.numel() and (largest := int(ids.max())) >= known:
        other = f"its tokenizer gives token {largest:,}, and its model knows {known:,}"
        raise MixerError(f"{who}: {folder}: {other}; save the model's own tokenizer there.")


def evaluate_folder(
    folder: Path | str,
    data: Path | str,
    *,
    window: int | None = None,
    max_bytes: int | None = None,
    device: str = "cpu",
) -> Score:
    """Compute the perplexity of a text file under a folder's language model.

    Args:
        window: tokens that are read together; default 128, or as many as the model takes.
        max_bytes: score only the first N bytes.

    Raises:
        MixerError: for a model that predicts no next token, no tokenizer, or a text shorter than a window.
    """
    model = _language_model("eval", Path(folder), device, "eval scores perplexity")
    batches = text_batches("eval", model, Path(folder), Path(data), window, max_bytes)
    found = measure_quality({"model": model}, batches)["model"]
    return Score(found.value, int(found.counts.sum()), batches[0]["input_ids"].shape[1])


def text_batches(
    who: str, model: nn.Module, folder: Path, data: Path, window: int | None = None, max_bytes: int | None = None
) -> list[dict[str, Tensor]]:
    """Cut a text file into batches of windows, by the tokenizer of a model's folder.

    Args:
        window: tokens of a row; default 128, or as many as the model takes.
    """
    limit = token_limit(model)
    size = min(WINDOW, limit or WINDOW) if window is None else window
    if size < 2 or size > (limit or size):
        raise MixerError(f"{who}: {folder}: windows hold 2 to {limit or 'any number of'} tokens, got {size}.")
    ids = text_tokens(who, folder, data, max_bytes)
    rows = ids[: len(ids) // size * size].view(-1, size)
    if not len(rows):
        raise MixerError(f"{who}: --data {data}: has {len(ids):,} tokens; a window of {size} needs as many.")
    check_vocabulary(who, folder, model, ids)
    device = next(model.parameters()).device
    return [{"input_ids": part.to(device)} for part in rows.split(ROWS)]


@torch.no_grad()
def sample_folder(
    folder: Path | str,
    *,
    tokens: int | None = None,
    prompt: str = "\n",
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    device: str = "cpu",
) -> tuple[str, str]:
    """Continue a prompt with a folder's language model; return prompt and continuation.

    Args:
        tokens: how many to generate; default 50, or as many as the model's length allows.

    Raises:
        MixerError: for a model that generates nothing, or more tokens than it takes.
    """
    check_sampling(temperature, top_k, top_p)
    model: Any = _language_model("sample", Path(folder), device, "sample continues a text")
    tokenizer = folder_tokenizer("sample", Path(folder))
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    start = [model.config.bos_token_id] if not ids and model.config.bos_token_id is not None else ids
    if not start:
        raise MixerError(f"sample: {folder}: its tokenizer makes no token of the prompt {prompt!r}; give another.")
    check_vocabulary("sample", Path(folder), model, torch.tensor(start, device="cpu"))
    limit = token_limit(model)
    room = TOKENS if limit is None else limit - len(start)
    count = min(TOKENS, room) if tokens is None else tokens
    if limit is not None and (room < 1 or count > room):
        asked = "" if tokens is None else f", got --tokens {tokens}"
        raise MixerError(f"sample: {folder}: takes {limit:,} tokens, of which the prompt has {len(start)}{asked}.")
    if count < 1:
        raise MixerError(f"sample: --tokens must be >= 1, got {tokens}.")
    chosen: Options = {"do_sample": temperature > 0}
    if temperature > 0:
        chosen |= {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0 if top_p is None else top_p}
    from ..huggingface.generation import FiniteScores

    given = torch.tensor([start], device=device)
    end = model.config.eos_token_id
    with torch.random.fork_rng():
        if seed is not None:
            torch.manual_seed(seed)
        try:
            out = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=count,
                pad_token_id=end if isinstance(end, int) else 0,
                use_cache=_streams(model),
                logits_processor=[FiniteScores(f"sample: {folder}")],
                **chosen,
            )
        except (RuntimeError, ValueError) as why:  # of NaN, or of settings in generation_config.json
            if isinstance(why, MixerError):
                raise
            reason = " ".join(str(why).split())[:200]
            raise MixerError(f"sample: {folder}: transformers generates no text ({reason}).") from None
    return prompt, tokenizer.decode(out[0, len(start) :], skip_special_tokens=True)


def _streams(model: nn.Module) -> bool:
    from .adapters import adapters_of

    return all(adapter.mixer.capabilities.streaming for adapter in adapters_of(model).values())


def _language_model(who: str, folder: Path, device: str, does: str) -> nn.Module:
    """Load a folder's model; refuse one that predicts no next token."""
    converted = json.loads((folder / "config.json").read_text()).get("kind") == "surgery"
    model: Any = load_converted(folder) if converted else open_host(str(folder))[0]
    if not predicts_next(model) or not (hasattr(model, "generate") and model.can_generate()):
        other = "tokenmix.lab.advise.compare.compare says how far it is from its teacher"
        raise MixerError(
            f"{who}: {folder} holds a {type(model).__name__}, which predicts no next token; {does}. {other}."
        )
    return model.to(device)
