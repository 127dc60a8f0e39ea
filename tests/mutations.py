"""Planted bugs. Each is a patch to library code and the one promise that must notice it, by comparison: a crash does not count.

Run as a script it checks promises on a case and prints the results as JSON; ``test_mutations.py`` does so in a fresh process on a patched copy.
"""

from __future__ import annotations

import json
import sys
from typing import NamedTuple


class Mutation(NamedTuple):
    """Replace ``old`` by ``new`` in one file of src/tokenmix; ``promise`` on ``case`` must then be broken."""

    name: str
    file: str
    old: str
    new: str
    case: str
    causal: bool
    promise: str


MUTATIONS = [
    # planted in: hydra
    # planted in: external
    # planted in: synthesizer
    # planted in: linear
    # planted in: local and other patterns
    # planted in: low rank
    # planted in: gated, convolutional and MLP
    Mutation(
        "taps of a causal window centred",
        "functional/_taps.py",
        "return size - 1 if causal else size // 2",
        "return size // 2",
        "lightconv",
        True,
        "future_cannot_reach_past",
    ),
    Mutation(
        "masked values heard by a window",
        "functional/_taps.py",
        "torch.where(key_mask[..., None], v, 0.0)",
        "v",
        "dynamicconv",
        False,
        "masked_keys_have_no_influence",
    ),
    Mutation(
        "distances off by one where positions are given",
        "functional/_taps.py",
        "cols[:, None] - rows[:, :, None] + centre",
        "cols[:, None] - rows[:, :, None] + centre + 1",
        "lightconv",
        False,
        "subset_equals_masked",
    ),
    Mutation(
        "lines and columns of a grid mixed up",
        "functional/_taps.py",
        "tap * size + step",
        "tap + size * step",
        "lambda-2d",
        False,
        "equals_reference",
    ),
    Mutation(
        "softmax over heads instead of taps",
        "functional/lightconv.py",
        "kernel.double().softmax(-1)",
        "kernel.double().softmax(-2)",
        "dynamicconv",
        False,
        "equals_reference",
    ),
    Mutation(
        "content lambda divided by another row's sum",
        "functional/lambda_layer.py",
        "den = e.sum(1)[..., None]",
        "den = e.sum(1)[..., None].roll(1, 0)",
        "lambda",
        False,
        "rows_are_independent",
    ),
    Mutation(
        "embeddings shifted by one distance",
        "functional/lambda_layer.py",
        "E[beyond : E.shape[0] - beyond]",
        "E[beyond + 1 : E.shape[0] - beyond + 1]",
        "lambda",
        False,
        "equals_reference",
    ),
    Mutation(
        "content lambda of the whole sequence",
        "functional/lambda_layer.py",
        "if causal else content_full(",
        "if False else content_full(",
        "lambda-window",
        True,
        "future_cannot_reach_past",
    ),
    Mutation(
        "hidden bias forgotten",
        "functional/mlp_mixer.py",
        "F.gelu(w1 @ v + b1[:, None])",
        "F.gelu(w1 @ v + 0 * b1[:, None])",
        "mlp_mixer",
        False,
        "equals_reference",
    ),
    Mutation(
        "bias where there is nothing to mix",
        "functional/mlp_mixer.py",
        "y = torch.where(key_mask.any(1)[:, None, None], y, 0.0)",
        "pass",
        "mlp_mixer",
        False,
        "nothing_to_attend",
    ),
    Mutation(
        "spatial matrix sees the next token",
        "functional/gmlp.py",
        "spatial = spatial.tril()",
        "spatial = spatial.tril(1)",
        "gmlp",
        True,
        "future_cannot_reach_past",
    ),
    Mutation(
        "spatial history one short",
        "mixers/gmlp.py",
        ".tril(S - L)",
        ".tril(S - L - 1)",
        "gmlp-toeplitz",
        True,
        "streaming_equals_parallel",
    ),
    Mutation(
        "windows divided by their size",
        "functional/pooling.py",
        "mean = total[..., :-1] / total[..., -1:].clamp_min(1.0)",
        "mean = total[..., :-1] / window",
        "pooling",
        False,
        "equals_reference",
    ),
    Mutation(
        "ring drops its newest token",
        "mixers/ring.py",
        "values=state.values[:, n:]",
        "values=state.values[:, : state.values.shape[1] - n]",
        "pooling-wide",
        True,
        "streaming_equals_parallel",
    ),
    Mutation(
        "sine with the wrong sign",
        "functional/fourier.py",
        "@ real - sin_t",
        "@ real + sin_t",
        "fourier",
        False,
        "equals_reference",
    ),
    Mutation(
        "rows transformed at the batch's length",
        "functional/fourier.py",
        "torch.where(live, place + 1, 1).double()",
        "(place + 1).double()",
        "fourier",
        False,
        "padded_equals_shorter",
    ),
    # planted in: content-sorted
    # planted in: memory
    # planted in: images
    Mutation(
        "window one too wide",
        "functional/aft.py",
        "reach, drop = (1 - window, window - 1)",
        "reach, drop = (-window, window)",
        "aft_local-3",
        False,
        "equals_reference",
    ),
    Mutation(
        "a token sees the next one",
        "functional/_sums.py",
        "device=k.device).tril()",
        "device=k.device).tril(1)",
        "aft_full",
        True,
        "future_cannot_reach_past",
    ),
    Mutation(
        "softmax attention sees the next one",
        "functional/_masks.py",
        "ok.tril(S - T)",
        "ok.tril(S - T + 1)",
        "attention",
        True,
        "future_cannot_reach_past",
    ),
    Mutation(
        "key mask ignored", "functional/_sums.py", "    if key_mask is not None:\n", "    if False:\n", "aft_simple", False, "masked_keys_have_no_influence"
    ),
    Mutation(
        "one maximum for all of time",
        "functional/_sums.py",
        "    step = 1\n    while step < k.shape[-2]:",
        "    return k.amax(-2, keepdim=True).expand_as(k)\n    step = 1\n    while step < k.shape[-2]:",
        "aft_simple",
        True,
        "future_cannot_reach_past",
    ),
    Mutation(
        "state forgets what leaves the ring",
        "mixers/aft_parts.py",
        "sums = far if only_near else chunk.absorb",
        "sums = far if True else chunk.absorb",
        "aft_local-3",
        True,
        "streaming_equals_parallel",
    ),
    Mutation(
        "positions of row 1 taken from row 0",
        "mixers/pair_bias.py",
        "self.weight[rows[:, :, None], cols[:, None, :]]",
        "self.weight[rows[:1].expand_as(rows)[:, :, None], cols[:1].expand_as(cols)[:, None, :]]",
        "aft_full",
        False,
        "subset_equals_masked",
    ),
    Mutation(
        "counter counts padding",
        "mixers/base.py",
        "start + counted[:, L - 1]",
        "start + L",
        "aft_full",
        True,
        "streaming_equals_parallel",
    ),
    Mutation(
        "default positions ignore left padding",
        "mixers/base.py",
        "(index - first).clamp_min(0)",
        "index",
        "aft_full",
        False,
        "padded_equals_shorter",
    ),
    Mutation(
        "reorder leaves the counter",
        "mixers/base.py",
        "lambda a: a.index_select(0, index)",
        "lambda a: a.index_select(0, index) if a.ndim > 1 else a",
        "aft_full",
        True,
        "reorder_picks_rows",
    ),
    Mutation("gate dropped", "functional/_gates.py", "GATES[gate](q.to(wide)) * y.to(wide)", "y.to(wide) + 0 * q", "aft_simple", False, "equals_reference"),
    Mutation("bias transposed", "functional/aft.py", "Dense(w if w.ndim == 2", "Dense(w.mT if w.ndim == 2", "aft_full", False, "equals_reference"),
    Mutation(
        "tokens far before the window dropped",
        "functional/_band.py",
        "near + _older(sums) + _older(sums.flip(-4)).flip(-4)",
        "near + _older(sums.flip(-4)).flip(-4)",
        "aft_local-3",
        False,
        "accurate_on_adversarial_keys",
    ),
    Mutation(
        "tokens before the window counted twice",
        "functional/_band.py",
        "delay(scan(over_all(*blocked(k, v, block))), 2)",
        "delay(scan(over_all(*blocked(k, v, block))), 1)",
        "aft_local-3",
        True,
        "accurate_on_adversarial_keys",
    ),
    Mutation("gamma ignored", "mixers/aft_conv.py", "self.gamma[:, None] * centred", "centred", "aft_conv", False, "every_parameter_learns"),
    Mutation(
        "gamma not initialised again",
        "mixers/aft_conv.py",
        "            nn.init.zeros_(self.gamma)\n",
        "            pass\n",
        "aft_conv",
        False,
        "builds_on_meta",
    ),
    Mutation(
        "ring one too short",
        "mixers/aft.py",
        "ring = max(self.window - 1, 0)",
        "ring = max(self.window - 2, 0)",
        "aft_local-3",
        True,
        "streaming_equals_parallel",
    ),
    Mutation("attn_mask inverted", "functional/_masks.py", "ok & attn_mask", "ok & ~attn_mask", "aft_full", False, "attn_mask_equals_causal"),
    Mutation("kernel flipped", "functional/_weights.py", "w = self.taps.double()[", "w = self.taps.flip(-1).double()[", "aft_conv", False, "equals_reference"),
    Mutation(
        "grid axes swapped",
        "functional/aft_conv.py",
        "for n in grid), indexing",
        "for n in reversed(grid)), indexing",
        "aft_conv-2d",
        False,
        "equals_reference",
    ),
    Mutation("prefix inside the grid", "functional/aft_conv.py", "place >= prefix", "place >= prefix - 1", "aft_conv-2d-prefix", False, "equals_reference"),
    Mutation(
        "denominators of another row",
        "functional/_sums.py",
        "torch.where(den > 0, den, 1.0)",
        "torch.where(den > 0, den, 1.0).roll(1, 0)",
        "aft_full",
        False,
        "rows_are_independent",
    ),
    Mutation(
        "no gradient through the denominator",
        "functional/_sums.py",
        "torch.where(den > 0, den, 1.0)",
        "torch.where(den > 0, den, 1.0).detach()",
        "aft_full",
        False,
        "equals_reference",
    ),
    Mutation(
        "keys rounded to half", "functional/_sums.py", "kd, vd = k.double()", "kd, vd = k.half().double()", "aft_simple", False, "accurate_on_adversarial_keys"
    ),
    Mutation(
        "merge takes the later maximum",
        "functional/_sums.py",
        "m = torch.maximum(a.m, b.m)\n    acc = a.acc * torch.exp(a.m - m + a.lift)",
        "m = torch.maximum(a.m, b.m)\n    acc = a.acc * torch.exp(a.lift)",
        "aft_simple",
        True,
        "merge_joins_stretches",
    ),
    Mutation(
        "context mask forgotten by the state",
        "mixers/aft.py",
        "AFTFullState(keys, values, alive(context, context_mask)",
        "AFTFullState(keys, values, alive(context, None)",
        "aft_full",
        False,
        "context_streams",
    ),
    Mutation(
        "packing forgets the mask",
        "mixers/base.py",
        "self.forward(padded, key_mask=mask)[mask]",
        "self.forward(padded)[mask]",
        "aft_simple",
        False,
        "packed_equals_separate",
    ),
    Mutation(
        "masks of numbers accepted",
        "mixers/base.py",
        "(key_mask.dtype != torch.bool or key_mask.shape != (B, S))",
        "key_mask.shape != (B, S)",
        "attention",
        False,
        "refuses_wrong_inputs",
    ),
    Mutation(
        "grouped heads read the wrong keys",
        "functional/attention.py",
        "a.to(wide).repeat_interleave(group, 1)",
        "a.to(wide).repeat(1, group, 1, 1)",
        "attention-grouped",
        False,
        "equals_reference",
    ),
    Mutation(
        "nothing to attend gives the mean",
        "functional/attention.py",
        "torch.where(some, y.transpose(1, 2).flatten(2), 0.0)",
        "y.transpose(1, 2).flatten(2)",
        "attention",
        True,
        "nothing_to_attend",
    ),
]


def main() -> None:
    """``mutations.py [case causal promise]...``: one JSON list of (status, reason)."""
    import torch

    import tokenmix
    from test_contract import subject_of
    from tokenmix.testing import PROMISES, run_promise

    torch.set_num_threads(1)
    asked = [sys.argv[i : i + 3] for i in range(1, len(sys.argv), 3)]
    results = [run_promise(subject_of(case, causal == "True"), promise, PROMISES[promise]) for case, causal, promise in asked]
    print(json.dumps({"library": tokenmix.__file__, "results": [(r.status, r.reason) for r in results]}))


if __name__ == "__main__":
    main()
