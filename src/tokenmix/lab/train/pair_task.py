"""Pairs of texts for an encoder-decoder: translation, summarisation, dialogue."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from ...errors import MixerError
from ...models import Seq2Seq
from ...system.files import whole_file
from ...types import Options, Record
from ..data.dialogues import fit_parts
from ..data.pair_sampler import LengthBuckets, PairBatch, pad_rows, pair_batch
from ..data.subwords import END, Subwords
from ..data.translations import PARALLEL_SETS, ParallelText, open_parallel
from .config import RunConfig
from .registry import TaskData
from .subword_task import SubwordTask, check_source, check_subwords, read_tokenizer, token_count, token_loss, token_nats
from .task import Evaluate, groups_of, record_seconds

METRICS = ("bleu", "chrf", "rouge")


@dataclass(frozen=True)
class PairDataConfig(TaskData):
    """Pairs of texts for an encoder-decoder.

    Args:
        source: a name in ``data.PARALLEL_SETS`` ("grammar", "docstrings"), a folder, a table, a file of dialogues or of
            sources; see ``data.open_parallel``. None: to be given (``--data``).
        path: where that folder, table or file lies, if ``source`` is only its name, as in the plan of a sweep.
        target: file with one target per line, where ``source`` is a file with one source per line.
        languages: endings of a folder's files, or columns of a table: source, then target. None: those there are, if
            they are two.
        version: what follows the split in the names of a folder's tables or dialogues, such as "self_original"; None:
            there is one file for each split.
        split: proportions of train, validation and test of pairs that are not split yet; None: 90/5/5.
        tokenizer: path of a ready ``tokenizer.json``; None: byte-level BPE of ``model.vocab`` tokens is trained on the
            training pairs. The run keeps a copy either way.
        max_tokens: most tokens of a source, and of a target, with the end, from 2 to the model's ``max_len``. Longer
            pairs are left out in training, and cut in evaluation. Of a dialogue, what fits is read: the last turn, the
            persona sentences, and as many turns before it.
        cut_sources: whether longer sources are cut in training too; pairs with a longer target are left out.
        batch_tokens: most tokens in a batch, of sources and targets together with their padding; None: no limit but
            ``train.batch_size`` pairs.
        smoothing: label smoothing in training, in [0, 1); 0: none.
        metrics: what is computed of the texts that the model writes: "bleu", "chrf", "rouge".
    """

    source: str | None = None
    path: str | None = None
    target: str | None = None
    languages: tuple[str, ...] | None = None
    version: str | None = None
    split: tuple[float, ...] | None = None
    tokenizer: str | None = None
    max_tokens: int = 64
    cut_sources: bool = False
    batch_tokens: int | None = None
    smoothing: float = 0.1
    metrics: tuple[str, ...] = ("bleu", "chrf")
    kind: ClassVar[str] = "pairs"


@dataclass(frozen=True)
class PairScore:
    """The score of an encoder-decoder on ``pairs`` pairs with ``tokens`` target tokens, their ends included.

    Attributes:
        cross_entropy: mean cross-entropy of a target token, given those before it, in nats.
        beams: targets that were followed at once when the model wrote its own; None: it wrote none.
        bleu: sacrebleu's BLEU of what it wrote, 0 to 100.
        chrf: sacrebleu's chrF2, 0 to 100.
        rouge1: F1 of single words in ROUGE, 0 to 100; rouge2 of pairs of words, rouge_l of the longest common
            subsequence.
        signature: sacrebleu's signature of BLEU, which says how texts were cut into words.
    """

    cross_entropy: float
    tokens: int
    pairs: int
    seconds: float = 0.0
    beams: int | None = None
    bleu: float | None = None
    chrf: float | None = None
    rouge1: float | None = None
    rouge2: float | None = None
    rouge_l: float | None = None
    signature: str | None = None

    def text(self) -> str:
        whole = (
            f"cross-entropy {self.cross_entropy:.4f}, perplexity {math.exp(min(self.cross_entropy, 700)):,.2f} per "
            + f"subword, {self.tokens:,} of them in {self.pairs:,} pairs"
        )
        named = (("BLEU", self.bleu), ("chrF", self.chrf), ("ROUGE-1", self.rouge1), ("ROUGE-2", self.rouge2))
        found = [f"{name} {value:.2f}" for name, value in (*named, ("ROUGE-L", self.rouge_l)) if value is not None]
        if not found:
            return whole
        how = f" ({self.signature})" if self.signature else ""
        return f"{whole}\n{', '.join(found)} with {self.beams} beam{'s' * (self.beams != 1)}{how}"


class Pool(NamedTuple):
    """Training pairs as tokens.

    Attributes:
        sources, targets: tokens of each pair, without start and end.
        buckets: which of them are in the batch of a step.
        left_out: number of pairs that are too long.
        tokens: of all pairs together, with one more for each side.
    """

    sources: list[list[int]]
    targets: list[list[int]]
    buckets: LengthBuckets
    left_out: int
    tokens: int


class PairTask(SubwordTask):
    """Train an encoder-decoder on pairs of texts. Training pairs are encoded once they are asked for."""

    config = PairDataConfig
    models = ("seq2seq",)
    movable = ("source", "path", "target", "tokenizer")
    writes = "translate"
    sets = PARALLEL_SETS
    scored = (
        *("data.source", "data.path", "data.split", "data.target", "data.languages", "data.tokenizer"),
        *("data.max_tokens", "train.eval_texts"),
    )
    reads = ("eval_texts", "samples")
    text: ParallelText
    metric = "cross_entropy"
    options = ("beams", "length_penalty", "max_texts", "written")

    def __init__(self, config: RunConfig, folder: Path | None = None):
        super().__init__(config, folder)
        self.encoded: dict[str, tuple[list[list[int]], list[list[int]]]] = {}

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Refuse options of pairs that are out of range."""
        data, model = cast(Any, config.data), cast(Any, config.model)
        check_subwords(data, model, 2)
        if not 0 <= data.smoothing < 1:
            raise MixerError(f"config: data.smoothing must be in [0, 1), got {data.smoothing}.")
        for name in data.metrics:
            if name not in METRICS:
                raise MixerError(f"config: data.metrics has no {name!r}; choose among {', '.join(METRICS)}.")

    def open_text(self) -> ParallelText:
        data: PairDataConfig = self.data
        if data.source is None:
            raise MixerError(
                "config: data.source is not set; give pairs of texts, such as --data grammar, --data docstrings, or a "
                + "folder with train.en, train.de, valid.en, ..."
            )
        return open_parallel(
            data.path or data.source,
            target=data.target,
            languages=data.languages,
            version=data.version,
            split=data.split,
        )

    def texts(self) -> Iterable[str]:
        return self.text.texts("train")

    @cached_property
    def pool(self) -> Pool:
        """The pairs that training draws from, which an evaluation alone does not need."""
        data: PairDataConfig = self.data
        sources, targets = self.tokens_of("train")
        most = data.max_tokens - 1
        if data.cut_sources:
            sources = [tokens[:most] for tokens in sources]
        fits = [i for i, pair in enumerate(zip(sources, targets, strict=True)) if max(map(len, pair)) <= most]
        if not fits:
            raise MixerError(
                f"data: no pair of {self.text.name} has at most {data.max_tokens} tokens (data.max_tokens)."
            )
        kept = [sources[i] for i in fits], [targets[i] for i in fits]
        lengths = torch.tensor([(len(a) + 1, len(b) + 1) for a, b in zip(*kept, strict=True)])
        buckets = LengthBuckets(
            lengths, batch_size=self.train.batch_size, batch_tokens=data.batch_tokens, seed=self.train.seed
        )
        return Pool(*kept, buckets, len(sources) - len(fits), int(lengths.sum()))

    def tokens_of(self, split: str) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of all sources and of all targets of a split."""
        if split not in self.encoded:
            sources, targets = (list(part) for part in zip(*self.text.split(split), strict=True))
            if self.text.dialogue:
                count = self.subwords.counter()
                sources = [fit_parts(source, self.data.max_tokens - 1, count) for source in sources]
            self.encoded[split] = self.subwords.encode_all(sources), self.subwords.encode_all(targets)
        return self.encoded[split]

    def facts(self) -> Record:
        return {"texts": {**self.same(), "left_out": self.pool.left_out}}

    def units(self) -> int:
        """Return the mean number of tokens per step, sources and targets together, without padding."""
        return round(self.pool.tokens / len(self.pool.buckets))

    def batch(self, step: int) -> tuple[PairBatch, Tensor]:
        rows = self.pool.buckets.rows(step)
        return pair_batch([self.pool.sources[i] for i in rows], [self.pool.targets[i] for i in rows])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return token_loss(outputs, targets, self.data.smoothing if torch.is_grad_enabled() else 0.0)

    def count_targets(self, targets: Tensor) -> int:
        return token_count(targets)

    @record_seconds
    def evaluate(
        self,
        model: Any,
        split: str,
        /,
        *,
        beams: int = 5,
        length_penalty: float = 1.0,
        max_texts: int | None = None,
        written: Path | None = None,
    ) -> PairScore:
        """Score the model on a split: its cross-entropy, and the metrics of what it writes itself.

        Sources and targets of more than ``data.max_tokens`` tokens are cut.

        Args:
            beams: targets that are followed at once; 0: the model writes nothing.
            length_penalty: see ``Seq2Seq.generate``.
            max_texts: score only the first pairs; None: all.
            written: file for what the model writes, one line per pair.
        """
        pairs = self.text.split(split)[:max_texts]
        sources, targets = ([t[: self.data.max_tokens - 1] for t in part[:max_texts]] for part in self.tokens_of(split))
        order = sorted(range(len(pairs)), key=lambda i: (len(sources[i]), len(targets[i])))
        groups = groups_of(order, self.train.eval_batch)
        batches = (pair_batch([sources[i] for i in group], [targets[i] for i in group]) for group in groups)
        nats, count = 0.0, 0
        for logits, said in self.answers(model, batches):
            nats += token_nats(logits, said.to(logits.device))
            count += token_count(said)
        score: Record = {}
        if beams:
            texts = self.write(model, sources, beams=beams, length_penalty=length_penalty)
            if written is not None:
                with whole_file(written) as f:
                    f.write("".join(text.replace("\n", " ") + "\n" for text in texts).encode())
            score = {"beams": beams, **measure_texts(self.data.metrics, texts, [target for _, target in pairs])}
        return PairScore(nats / count, count, len(pairs), **score)

    def write(self, model: Seq2Seq, sources: list[list[int]], **options: Any) -> list[str]:
        """Return the text that the model writes for each source, given as tokens."""
        given: Options = {"rows": self.train.eval_batch, **options}
        return write_texts(model, self.subwords, sources, self.data.max_tokens, **given)

    @classmethod
    def score_test_split(cls, evaluate: Evaluate, test_bytes: int | None) -> Record:
        """Score what the model writes for the sources of the test split."""
        score = evaluate()
        found = {name: getattr(score, name) for name in ("bleu", "chrf", "rouge_l")}
        return {name: round(value, 3) for name, value in found.items() if value is not None}

    @classmethod
    def translate_text(cls, config: RunConfig, run: Path, model: Seq2Seq, text: str, **sampling: Any) -> str:
        subwords, most = read_tokenizer(run), cast(PairDataConfig, config.data).max_tokens
        tokens = subwords.encode(text.strip())
        check_source(tokens, most)
        return write_texts(model, subwords, [tokens], most, **sampling)[0]

    def eval_options(self) -> Options:
        return {"beams": 0, "max_texts": self.train.eval_texts}

    def sample(self, model: Seq2Seq, folder: Path, step: int) -> None:
        """Write what the model makes of the first ``train.samples`` sources of the validation split."""
        if not self.train.samples:
            return
        pairs = self.text.split("valid")[: self.train.samples]
        sources = [tokens[: self.data.max_tokens - 1] for tokens in self.tokens_of("valid")[0][: self.train.samples]]
        texts = self.write(model, sources, beams=1)
        rows = zip(pairs, texts, strict=True)
        text = "\n".join(f"source  {a}\ntarget  {b}\nmodel   {said}\n" for (a, b), said in rows)
        self.write_sample(folder, step, text)


def write_texts(
    model: Seq2Seq, subwords: Subwords, sources: list[list[int]], most: int, *, rows: int = 16, **options: Any
) -> list[str]:
    """Return the text that an encoder-decoder writes for each source, given as tokens.

    Args:
        most: tokens of a text, at most.
        rows: sources that are read at once.
        options: those of ``Seq2Seq.generate``.
    """
    found: list[str] = [""] * len(sources)
    order, device = sorted(range(len(sources)), key=lambda i: len(sources[i])), next(model.parameters()).device
    for group in groups_of(order, rows):
        tokens, mask = pad_rows([[*sources[i], END] for i in group])
        said = model.generate(tokens.to(device), most, source_mask=mask.to(device), **options)
        for i, row in zip(group, said.tolist(), strict=True):
            found[i] = subwords.decode(row[: row.index(END)] if END in row else row)
    return found


def measure_texts(metrics: tuple[str, ...], written: list[str], wanted: list[str]) -> Record:
    """Return the metrics of texts against the targets that were wanted, by the libraries of the field."""
    found: Record = {}
    try:
        if "bleu" in metrics:
            from sacrebleu.metrics import BLEU

            bleu = BLEU()
            found["bleu"] = bleu.corpus_score(written, [wanted]).score
            found["signature"] = str(bleu.get_signature())
        if "chrf" in metrics:
            from sacrebleu.metrics import CHRF

            found["chrf"] = CHRF().corpus_score(written, [wanted]).score
        if "rouge" in metrics:
            from rouge_score.rouge_scorer import RougeScorer

            names = {"rouge1": "rouge1", "rouge2": "rouge2", "rougeL": "rouge_l"}
            scorer, sums = RougeScorer(list(names), use_stemmer=True), Counter[str]()
            for text, target in zip(written, wanted, strict=True):
                for name, value in scorer.score(target, text).items():
                    sums[names[name]] += value.fmeasure
            found |= {name: 100 * sums[name] / len(written) for name in names.values()}
    except ImportError as why:
        raise MixerError(f"eval: these metrics need the extra 'text' ({why}): pip install 'tokenmix[text]'.") from None
    return found
