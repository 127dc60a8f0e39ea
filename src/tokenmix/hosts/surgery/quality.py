"""Score models on held-out batches: perplexity where they predict the next token, else agreement with the teacher."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import MixerError
from ...system.calls import call_model
from .adapters import adapters_of
from .capture import final_output
from .sites import find_attention

PERPLEXITY, AGREEMENT, COSINE = "perplexity", "top-1 agreement", "cosine"
ERRORS, ROUNDING = 2.0, 1e-5
"""The standard errors, and the nats or parts, beyond which the difference of two models on the same rows counts."""


@dataclass(frozen=True)
class Quality:
    """Hold a model's scores on held-out rows.

    Args:
        measure: "perplexity", of the next token; "top-1 agreement", the share of tokens or rows for which the teacher's
            largest logit is the model's; or "cosine", the mean cosine between its last hidden states and the teacher's.
        rows: one score per sequence or image, float64: mean negative log-likelihood in nats for perplexity, else the
            share or the cosine.
        counts: how many tokens each row stands for.
    """

    measure: str
    rows: Tensor
    counts: Tensor

    @property
    def value(self) -> float:
        """The score over all rows: exp of the mean for perplexity, else the mean."""
        mean = float((self.rows * self.counts).sum() / self.counts.sum())
        return (
            float(torch.tensor(mean, dtype=torch.float64, device="cpu").exp()) if self.measure == PERPLEXITY else mean
        )

    def text(self) -> str:
        """Format the score with its unit."""
        return score_text(self.measure, self.value)

    def change(self, before: Quality) -> str:
        """Return "better", "worse" or "same": the paired difference over the rows, in standard errors.

        Over a single row nothing is known of the noise, and only scores equal up to rounding are the same. A score that
        is no number is worse than any.
        """
        if not self.rows.isfinite().all():
            return "worse"
        difference = self.rows - before.rows if self.measure != PERPLEXITY else before.rows - self.rows
        weights = self.counts / self.counts.sum()
        mean, n = float((weights * difference).sum()), len(difference)
        error = float((weights * (difference - mean)).square().sum().sqrt()) * (n / (n - 1)) ** 0.5 if n > 1 else 0.0
        return "same" if abs(mean) <= max(ERRORS * error, ROUNDING) else "better" if mean > 0 else "worse"


def score_text(measure: str, value: float) -> str:
    """Format a score: a perplexity as a number, an agreement in percent, a cosine with three digits."""
    return f"{100 * value:.1f} %" if measure == AGREEMENT else f"{value:.3f}" if measure == COSINE else f"{value:,.2f}"


def predicts_next(model: nn.Module) -> bool:
    """Return whether all attention of a model, its own and replaced, is causal and within one sequence.

    A model of transformers that generates no text predicts something else, as one for token classification does.
    """
    sites = find_attention(model) + [adapter.site for adapter in adapters_of(model).values()]
    generates = getattr(model, "can_generate", lambda: True)
    return bool(sites) and all(site.causal and not site.cross for site in sites) and bool(generates())


def score_rows(given: object, wanted: object, batch: object, causal: bool) -> Quality:
    """Score one batch's outputs ``given``, beside the teacher's ``wanted``.

    Args:
        batch: what the model was called with; its ``attention_mask`` tells padding.
        causal: the model predicts the next token of ``input_ids``.
    """
    (mine, logits), (theirs, _) = final_output(given), final_output(wanted)
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    mask = None if mask is None or mask.ndim != 2 or mask.shape != mine.shape[:2] else mask.bool()
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch if isinstance(batch, Tensor) else None
    if causal and logits and mine.ndim == 3 and isinstance(ids, Tensor) and ids.shape[1] > 1:
        losses = F.cross_entropy(mine[:, :-1].transpose(1, 2).float(), ids[:, 1:], reduction="none").double()
        return _mean_rows(PERPLEXITY, losses, None if mask is None else mask[:, 1:] & mask[:, :-1])
    if logits:
        same = (mine.argmax(-1) == theirs.argmax(-1)).double()
        same[mine.isnan().any(-1) | theirs.isnan().any(-1)] = torch.nan  # argmax takes NaN for the largest
        return _mean_rows(AGREEMENT, same[:, None] if same.ndim == 1 else same, mask if same.ndim == 2 else None)
    near = F.cosine_similarity(mine.double(), theirs.double(), dim=-1)
    return _mean_rows(COSINE, near.reshape(len(near), -1), mask if near.ndim == 2 else None)


def _mean_rows(measure: str, values: Tensor, mask: Tensor | None) -> Quality:
    weights = torch.ones_like(values) if mask is None else mask.to(values.dtype)
    counts = weights.sum(1)
    kept = counts > 0  # a row of nothing but padding says nothing
    rows = torch.where(weights > 0, values, 0.0).sum(1)[kept] / counts[kept]
    return Quality(measure, rows.cpu(), counts[kept].cpu())


def join_qualities(parts: list[Quality]) -> Quality:
    """Join the scores of several batches."""
    return Quality(parts[0].measure, torch.cat([p.rows for p in parts]), torch.cat([p.counts for p in parts]))


@torch.no_grad()
def measure_quality(models: Mapping[str, nn.Module], batches: Iterable[object]) -> dict[str, Quality]:
    """Score models on the same batches; the first is the teacher, to which the others are compared.

    Raises:
        MixerError: if there are no batches, or the teacher's scores are no numbers.
    """
    causal = predicts_next(next(iter(models.values())))
    found: dict[str, list[Quality]] = {name: [] for name in models}
    for batch in batches:
        wanted: object = None
        for name, model in models.items():
            given = call_model(model, batch)
            wanted = given if wanted is None else wanted
            found[name].append(score_rows(given, wanted, batch, causal))
    if not all(found.values()):
        raise MixerError("measure_quality: got no batches; over none, every model would look the same.")
    scores = {name: join_qualities(parts) for name, parts in found.items()}
    name, first = next(iter(scores.items()))
    if not len(first.rows):
        raise MixerError("measure_quality: the batches hold padding only; give some real tokens.")
    if not first.rows.isfinite().all():
        why = "the outputs are no finite numbers on this data; check the weights"
        raise MixerError(f"measure_quality: {first.measure} of the model {name!r} is {first.value}: {why}.")
    return scores
