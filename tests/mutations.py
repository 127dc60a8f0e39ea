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
    # planted in: content-sorted
    # planted in: memory
    Mutation(
        "relative distances one off",
        "functional/transformer_xl.py",
        "torch.arange(L - 1 - first, least - 1, -1",
        "torch.arange(L - first, least, -1",
        "transformer_xl",
        False,
        "equals_reference",
    ),
    Mutation(
        "memory one too long", "functional/transformer_xl.py", "((i - j) < memory)", "((i - j) <= memory)", "transformer_xl-memory", True, "equals_reference"
    ),
    Mutation(
        "memory forgets a token too many",
        "mixers/transformer_xl.py",
        "state if self.memory is None else forget(state, self.memory - 1)",
        "state if self.memory is None else forget(state._replace(live=state.live.index_fill(1, torch.tensor(-3), False)), self.memory - 1)",
        "transformer_xl-memory",
        True,
        "streaming_equals_parallel",
    ),
    Mutation("groups seen twice", "functional/_compressed.py", "& (ids < first)", "& (ids <= first)", "compressive", True, "equals_reference"),
    Mutation(
        "masked tokens count in the mean",
        "functional/_compressed.py",
        "tokens.sum(2) / live.sum(2).clamp_min(1)",
        "tokens.mean(2)",
        "compressive",
        False,
        "equals_reference",
    ),
    Mutation(
        "half a group replaces the whole one",
        "mixers/compressive.py",
        "(fresh.ids > state.gone[:, None])",
        "(fresh.ids >= state.gone[:, None])",
        "compressive",
        True,
        "streaming_equals_parallel",
    ),
    # planted in: images
    Mutation("a line is read before it has ended", "functional/axial.py", 'upto" else -1)', 'upto" else 0)', "axial", True, "future_cannot_reach_past"),
    Mutation(
        "columns attended along rows",
        "functional/axial.py",
        "table = raster.cells(T, device).movedim(axis, -1)",
        "table = raster.cells(T, device).movedim(1, -1)",
        "axial-grid",
        False,
        "equals_reference",
    ),
    Mutation(
        "an unfinished line is kept",
        "mixers/axial.py",
        "(row == row[:, -1:])[..., None]",
        "(row < row[:, -1:])[..., None]",
        "axial",
        True,
        "streaming_equals_parallel",
    ),
    Mutation(
        "memory block one short", "functional/image_local.py", "(offset >= -reach)", "(offset > -reach)", "image_local", True, "streaming_equals_parallel"
    ),
    Mutation(
        "memory beside the block above it",
        "functional/image_local.py",
        "(reach if axis == 1 else 0)",
        "(reach if axis == 0 else 0)",
        "image_local-2d",
        False,
        "equals_reference",
    ),
    Mutation(
        "tokens before the start see the first",
        "functional/_lines.py",
        "torch.where((index >= 0)[..., None], moved, 0.0)",
        "moved",
        "image_local",
        True,
        "nothing_to_attend",
    ),
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
