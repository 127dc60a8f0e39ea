"""Let ``generate()`` of transformers refuse logits that are no numbers, from which it would pick plausible tokens."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from transformers.generation import GenerationConfig, GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation.utils import GenerateOutput

from ...errors import MixerError
from ...models.sampling import finite_rows, not_finite

COLDEST = 1e-20
"""The smallest temperature by which transformers may divide logits in float32."""


class FiniteScores(LogitsProcessor):
    """Refuse scores (rows, vocab) of a next token that are NaN, +inf or all -inf; ``who`` is named in the error."""

    def __init__(self, who: str):
        self.who = who

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores as they are."""
        bad = (~finite_rows(scores)).nonzero()
        if len(bad):
            raise MixerError(not_finite(self.who, f"logits of token {input_ids.shape[-1]}", int(bad[0])))
        return scores


class FiniteGenerationMixin(GenerationMixin):
    """Generation as in transformers, which refuses logits that are not finite."""

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> GenerateOutput | Tensor:
        """Generate as transformers does; the arguments are those of ``GenerationMixin.generate``.

        Raises:
            MixerError: if the logits of a token are NaN or infinite, and for a temperature too small to divide by.
        """
        who = f"{type(self).__name__}.generate"
        among: Any = generation_config or self.generation_config  # type: ignore[attr-defined]  # of PreTrainedModel
        heat = kwargs.get("temperature", among.temperature)
        if isinstance(heat, float) and (0 < heat < COLDEST or heat == math.inf):
            raise MixerError(f"{who}: temperature must be a number from {COLDEST:g}, got {heat}; do_sample=False is 0.")
        checks = LogitsProcessorList([*(logits_processor or ()), FiniteScores(who)])
        return super().generate(inputs, generation_config, checks, *args, **kwargs)
