"""Text as bytes: next-byte prediction, scored in bits per byte."""

from __future__ import annotations

import copy
import gzip
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import MixerError
from ...mixers import Mixer, state_bytes
from ...models import LM, build_model, evaluation_mode
from ...positions.rotary import rescale_rotary
from ...types import Options, Record
from ..data import CORPORA, Bounds, Corpus, Sampler, open_corpus
from ..data.inventory import Inventory
from .config import RunConfig
from .evaluate import EvalResult, evaluate
from .registry import TaskData
from .task import Evaluate, Task

SAMPLE_PROMPT = 32


def open_data(config: DataConfig) -> Corpus:
    """Open the corpus of a config and check that it is long enough for its sequences."""
    corpus = open_corpus(config.source, path=config.path, split=config.split, bounds=Bounds(config.max_unpacked))
    corpus.check_length(config.seq_len)
    return corpus


@dataclass(frozen=True)
class DataConfig(TaskData):
    """The corpus of a language model.

    Args:
        source: "stdlib" (the Python sources on this machine, the default), "enwik8", or the path of a text file or
            folder.
        path: local copy of enwik8 (raw, .gz or .zip); None: downloaded. Only allowed with ``source="enwik8"``.
        split: proportions of train, validation and test, such as [90, 5, 5]; None: 90/5/5. enwik8 always has its
            official 90M/5M/5M bytes.
        seq_len: bytes per training sequence, from 1 to the model's ``max_len``.
        max_unpacked: bytes that an archive may unpack to, at least 1; None: 64 MiB or 100 times the archive's size,
            whichever is more.
    """

    source: str = "stdlib"
    path: str | None = None
    split: tuple[float, ...] | None = None
    seq_len: int = 256
    max_unpacked: int | None = None
    kind: ClassVar[str] = "text"


def check_length(config: RunConfig) -> None:
    """Refuse sequences that are longer than the model's, and windows that leave tokens out."""
    data, model, stride = cast(Any, config.data), cast(Any, config.model), config.train.stride
    if not 1 <= data.seq_len <= model.max_len:
        raise MixerError(f"config: data.seq_len must be in 1..model.max_len={model.max_len}, got {data.seq_len}.")
    if stride is not None and not 1 <= stride <= data.seq_len:
        raise MixerError(f"config: train.stride must be in 1..data.seq_len={data.seq_len}, got {stride}.")


class TextTask(Task):
    """Train a language model on a corpus."""

    config = DataConfig
    models = ("lm",)
    movable = ("source", "path", "max_unpacked")
    writes, tokens = "write", "bytes"
    sets = CORPORA
    downloads = ("enwik8",)
    scored = ("data.source", "data.path", "data.split", "train.eval_bytes")
    reads = ("eval_bytes", "stride", "sample_bytes")
    metric = "bits_per_byte"
    options = ("stride", "seq_len", "max_bytes", "by_context", "scaling", "resize")
    shares_tokens = True

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        self.corpus = open_data(self.data)
        self.sampler = Sampler(
            self.corpus.split("train"),
            seq_len=self.data.seq_len,
            batch_size=self.train.batch_size,
            seed=self.train.seed,
        )

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Refuse lengths that the model does not have."""
        check_length(config)

    def facts(self) -> Record:
        corpus = self.corpus
        return {
            "corpus": {
                "name": corpus.name,
                "bytes": corpus.size,
                "sha256": corpus.sha256,
                "splits": list(corpus.bounds),
            }
        }

    def inventory(self) -> Inventory | None:
        return self.corpus.inventory

    def check_same(self, env: Record) -> None:
        corpus, then = self.corpus, env.get("corpus", {})
        if then and then.get("splits", list(corpus.bounds)) != list(corpus.bounds) and then["sha256"] == corpus.sha256:
            raise MixerError(
                f"the splits of {corpus.name} ({corpus.path}) changed since this run began: they ended at bytes "
                f"{then['splits']}, now at {list(corpus.bounds)}; restore the old ones, or start a new run."
            )
        if then and (then["bytes"], then["sha256"]) != (corpus.size, corpus.sha256):
            raise MixerError(
                f"the corpus {corpus.name} ({corpus.path}) changed since this run began: "
                f"it had {then['bytes']} bytes with sha256 {then['sha256'][:16]}..., "
                f"now {corpus.size} with {corpus.sha256[:16]}...; restore the old one, or start a new run."
            )

    def units(self) -> int:
        return self.train.batch_size * self.data.seq_len

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        return self.sampler.batch(step)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(outputs.dtype, torch.float32)
        return F.cross_entropy(outputs.to(wide).flatten(0, 1), targets.flatten())

    def count_targets(self, targets: Tensor) -> int:
        return targets.numel()

    def train_fields(self, loss: float) -> Record:
        return {"bpb": loss / math.log(2)}

    def evaluate(
        self,
        model: Any,
        split: str,
        *,
        scaling: str | Options | None = None,
        resize: bool | None = None,
        **options: Any,
    ) -> EvalResult:
        """Score the model on a split; the options are those of ``train.evaluate``.

        Args:
            scaling: rule for rotary positions in windows longer than those of training, as ``rescale_rotary`` takes it.
            resize: whether a copy of the model is scored that ``resize`` has stretched to the windows.
        """
        given = {
            "batch_size": self.train.eval_batch,
            "seq_len": self.data.seq_len,
            "precision": self.train.precision,
            **options,
        }
        if resize:
            if not hasattr(model, "resize") or model.max_len is None:
                raise MixerError(f"eval: {type(model).__name__} has nothing to resize: no part of it has a length.")
            model = copy.deepcopy(model).resize(given["seq_len"])
            return replace(self.evaluate(model, split, scaling=scaling, **options), resized=model.max_len)
        if scaling is None:
            return evaluate(model, self.corpus.split(split), **given)
        with rescale_rotary(model, scaling, old=self.data.seq_len, new=given["seq_len"]) as rule:
            return replace(evaluate(model, self.corpus.split(split), **given), scaling=rule)

    def yardsticks(self) -> dict[str, float]:
        valid = self.corpus.split("valid")[: self.train.eval_bytes]
        return {"gzip -9": round(gzip_score(bytes(valid.tolist())), 4)}

    @classmethod
    def score_test_split(cls, evaluate: Evaluate, test_bytes: int | None) -> Record:
        if test_bytes is None:
            return {}
        options: Options = {"split": "test", "max_bytes": test_bytes}
        whole, parts = evaluate(**options), evaluate(by_context=True, **options)
        return {"test": whole.bits_per_byte, "by_context": parts.by_context}

    @classmethod
    def score_lengths(
        cls, config: RunConfig, lengths: tuple[int, ...], evaluate: Evaluate, test_bytes: int | None
    ) -> Record:
        """Score bytes with more context than ``data.seq_len``, from the next power of two on, in bits.

        The windows have the largest length. None for a model that is not built for it.
        """
        trained = cast(DataConfig, config.data).seq_len
        check_beyond(lengths, trained, "data.seq_len")
        with torch.device("meta"):
            longest: Any = build_model(config.model).max_len  # type: ignore[arg-type]  # an LMConfig
        if longest is not None and longest < max(lengths):
            return {"beyond": None}
        parts = evaluate(by_context=True, seq_len=max(lengths), max_bytes=test_bytes).by_context
        later = [(most + 1 - least, bits) for least, most, bits in parts if least > trained]
        return {"beyond": sum(n * bits for n, bits in later) / sum(n for n, _ in later), "by_context_beyond": parts}

    @classmethod
    def streams(cls, config: RunConfig) -> int:
        return cast(DataConfig, config.data).seq_len

    @classmethod
    def trial(cls, config: RunConfig) -> Options:
        return {"train.eval_bytes": min(config.train.eval_bytes or 1 << 30, 4 * config.train.eval_batch * 256)}

    @classmethod
    def continue_text(
        cls, config: RunConfig, run: Path, model: LM, prompt: bytes, n: int | None, **sampling: Any
    ) -> bytes:
        if n is None:
            n = 500 if model.max_len is None else max(1, min(500, model.max_len - len(prompt)))
        return continue_bytes(model, prompt, n, **sampling)

    def eval_options(self) -> Options:
        return {"stride": self.train.stride, "max_bytes": self.train.eval_bytes}

    def sample(self, model: LM, folder: Path, step: int) -> None:
        """Let the model continue the first bytes of the validation split."""
        train = self.train
        if not train.sample_bytes:
            return
        limit = model.max_len or 1 << 30
        prompt = bytes(self.corpus.split("valid")[: min(SAMPLE_PROMPT, limit - 1)].tolist())
        text = continue_bytes(
            model, prompt, min(train.sample_bytes, limit - len(prompt)), temperature=0.8, seed=train.seed
        )
        self.write_sample(folder, step, text)

    def model_facts(self, model: LM) -> Record:
        return streaming_cost(model)


def check_beyond(lengths: tuple[int, ...], trained: int, name: str) -> None:
    """Refuse lengths of which none lies beyond that of training, the field ``name``."""
    if max(lengths) <= trained:
        raise MixerError(f"sweep: no size of lengths={list(lengths)} lies beyond {name}={trained}.")


def gzip_score(data: bytes) -> float:
    """Return the bits per byte of ``gzip -9``."""
    return 8 * len(gzip.compress(data, 9)) / len(data)


def continue_bytes(model: LM, prompt: bytes, n: int, **sampling: Any) -> bytes:
    """Return the prompt followed by n generated bytes."""
    if not prompt:
        raise MixerError("the prompt is empty; a language model needs at least one byte to start from.")
    tokens = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    return bytes(model.generate(tokens, n, **sampling)[0].tolist())


@torch.no_grad()
def streaming_cost(model: Any, context: int = 1024) -> dict[str, int]:
    """Measure the bytes of streaming state that one row holds after ``context`` tokens.

    A model whose length is shorter is measured at its full length; of a model that does not stream nothing is measured.
    """
    if any(isinstance(m, Mixer) and not m.capabilities.streaming for m in model.modules()):
        return {}
    length = min(context, model.max_len or context)
    device = next(model.parameters()).device
    with evaluation_mode(model):
        _, state = model.extend(torch.zeros(1, length, dtype=torch.long, device=device), model.init_state(1))
    return {"state_bytes_per_row": state_bytes(state), "state_context": length}
