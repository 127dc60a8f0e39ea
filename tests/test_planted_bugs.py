"""Plant bugs in digits, samplers, loops, the tasks on texts, ranks and long gradients; the named test must notice each.

Each is patched into a copy of the library, on which the test runs in a process of its own and must fail by comparison.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
LIBRARY = HERE.parent / "src" / "tokenmix"


class Bug(NamedTuple):
    """Replace ``old`` by ``new`` in one file of the library; ``test`` in ``tests/<suite>.py`` must then fail."""

    name: str
    file: str
    old: str
    new: str
    suite: str
    test: str


BUGS = [
    Bug(
        "the offset of Abacus stays at test time",
        "positions/digits.py",
        "if self.training and self.max_offset > 1:",
        "if self.max_offset > 1:",
        "test_digit_positions",
        "test_offsets_move_digits_in_training_alone",
    ),
    Bug(
        "Abacus moves what is no digit",
        "positions/digits.py",
        "offset if self.separators_move else torch.where(places > 0, offset, 0)",
        "offset",
        "test_digit_positions",
        "test_offsets_move_digits_in_training_alone",
    ),
    Bug(
        "a stream forgets that it is inside a number",
        "models/lm.py",
        "before = run[0] if run else",
        "before = run[0] * 0 if run else",
        "test_digit_positions",
        "test_streams_in_any_cuts_equal_the_whole",
    ),
    Bug(
        "padding counts as a digit",
        "positions/digits.py",
        "counted = valid & ~digit, valid.long().cumsum(1)",
        "counted = valid & ~digit, torch.ones_like(valid).long().cumsum(1)",
        "test_digit_positions",
        "test_places_equal_those_of_a_loop_with_padding_and_any_start",
    ),
    Bug(
        "positions are sampled in evaluation",
        "models/lm.py",
        "if self.training and self.config.sample_positions is not None:",
        "if self.config.sample_positions is not None:",
        "test_digit_positions",
        "test_a_model_samples_in_training_alone_and_tells_its_mixers",
    ),
    Bug(
        "the input is injected before the first pass alone",
        "models/looped.py",
        "return s + x if self.mix is None",
        "return s + x * (s is x) if self.mix is None",
        "test_digit_positions",
        "test_passes_are_the_blocks_stacked",
    ),
    Bug(
        "a stream does not inject",
        "models/trunk.py",
        "self.blocks[n].extend(s if self.loop is None else self.loop.inject(s, x, n), old, **given)",
        "self.blocks[n].extend(s, old, **given)",
        "test_digit_positions",
        "test_streams_in_any_cuts_equal_the_whole",
    ),
    Bug(
        "a sum without its carries",
        "data/characters.py",
        "total = sums[:, column] + carry",
        "total = sums[:, column]",
        "test_characters",
        "test_rows_of_a_size_say_what_is_true",
    ),
    Bug(
        "a sort that is not stable among digits",
        "data/characters.py",
        "order = order.gather(1, key.argsort(dim=1, stable=True))",
        "order = key.argsort(dim=1, stable=True)",
        "test_characters",
        "test_rows_of_a_size_say_what_is_true",
    ),
    Bug(
        "a decoder reads the padding of its source",
        "models/blocks.py",
        "crossed = self.cross(asked, context, key_mask=context_mask,",
        "crossed = self.cross(asked, context, key_mask=None,",
        "test_seq2seq",
        "test_padding_on_either_side_changes_nothing",
    ),
    Bug(
        "a streaming decoder reads the padding of its source",
        "models/blocks.py",
        "context=context, context_mask=context_mask))",
        "context=context))",
        "test_seq2seq",
        "test_a_streamed_target_equals_the_whole",
    ),
    Bug(
        "beams keep the states of other targets",
        "models/seq2seq.py",
        "self.state = reorder(self.state, index)",
        "self.state = reorder(self.state, index.sort().values)",
        "test_seq2seq",
        "test_beams_of_states_are_those_of_targets_read_again",
    ),
    Bug(
        "a beam search forgets the length",
        "models/beam.py",
        "Found(float(best[i, j]) / length**self.penalty, written)",
        "Found(float(best[i, j]), written)",
        "test_seq2seq",
        "test_a_wide_beam_finds_what_a_search_of_everything_finds",
    ),
    Bug(
        "the sums of a beam are those of its step",
        "models/beam.py",
        "(sums[..., None] + logs)",
        "(sums[..., None].clamp_min(-1e30).sign() + logs)",
        "test_seq2seq",
        "test_a_wide_beam_finds_what_a_search_of_everything_finds",
    ),
    Bug(
        "padding of a target is to be predicted",
        "data/pair_sampler.py",
        "said.masked_fill(~target_mask, IGNORED)",
        "said",
        "test_pairs",
        "test_a_batch_begins_targets_and_ends_both",
    ),
    Bug(
        "parts of a batch weigh alike, whatever they hold",
        "train/loop.py",
        "(self.task.weight(y) / all_targets)",
        "(1 / parts)",
        "test_pairs",
        "test_accumulation_gives_the_same_step",
    ),
    Bug(
        "rows of one length come in one order for ever",
        "data/pair_sampler.py",
        "manual_seed(mix64(self._key(epoch)) & MASK)",
        "manual_seed(0)",
        "test_pairs",
        "test_every_epoch_visits_each_row_once_within_the_limits",
    ),
    Bug(
        "packed texts see each other",
        "models/trunk.py",
        "starts = starts.clone()\n        starts[:, :1] = True",
        "starts = torch.zeros_like(starts)\n        starts[:, :1] = True",
        "test_documents",
        "test_packed_texts_do_not_see_each_other",
    ),
    Bug(
        "positions of packed texts count on",
        "models/trunk.py",
        "return index - torch.where(starts, index, 0).cummax(1).values, ends.int()",
        "return index, ends.int()",
        "test_documents",
        "test_packed_texts_do_not_see_each_other",
    ),
    Bug(
        "tokens of a word are masked one by one",
        "data/masking.py",
        "draws[0][rows, word].masked_fill",
        "draws[0].masked_fill",
        "test_documents",
        "test_whole_words_are_masked_together_and_special_tokens_never",
    ),
    Bug(
        "padding is masked",
        "train/document_task.py",
        "            tokens >= len(SPECIAL),\n            draws,",
        "            tokens >= 0,\n            draws,",
        "test_documents",
        "test_no_mask_falls_on_what_is_not_text",
    ),
    Bug(
        "a packed model predicts the start of the next text",
        "train/document_task.py",
        "nothing = starts | (tokens == PAD)",
        "nothing = tokens == PAD",
        "test_documents",
        "test_a_packed_language_model_predicts_no_start_of_the_next_text",
    ),
    Bug(
        "every span has the same sentinel",
        "data/masking.py",
        "source += [*tokens[at : at + kept], sentinel]",
        "source += [*tokens[at : at + kept], sentinels[0]]",
        "test_documents",
        "test_spans_and_the_rest_are_the_text_again",
    ),
    Bug(
        "the shorter text of a pair is cut",
        "train/label_task.py",
        "longest = sizes.index(max(sizes))",
        "longest = sizes.index(min(size for size in sizes if size))",
        "test_documents",
        "test_of_a_pair_the_longer_text_is_cut",
    ),
    Bug(
        "a rank adds its own segment to what came before it",
        "parallel/program.py",
        "for other in every[:rank]:",
        "for other in every[: rank + 1]:",
        "test_parallel",
        "test_equals_one_process and hydra",
    ),
    Bug(
        "a scan in steps is inclusive",
        "parallel/program.py",
        "return (yield Shift(segment, 1))",
        "return segment",
        "test_parallel",
        "test_equals_one_process and hydra",
    ),
    Bug(
        "what lies before a document counts",
        "parallel/program.py",
        "cut=torch.ones_like(segment.cut)",
        "cut=segment.cut",
        "test_segments",
        "test_nothing_before_a_document_counts and hydra",
    ),
    Bug(
        "the gradient of the state is dropped between chunks",
        "parallel/long_backward.py",
        "if g is not None and a.requires_grad:",
        "if g is None and a.requires_grad:",
        "test_long_backward",
        "test_equals_the_ordinary_backward and hydra",
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_planted_bug_is_noticed(bug, tmp_path):
    library = Path(
        shutil.copytree(LIBRARY, tmp_path / "tokenmix", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    )
    text = (library / bug.file).read_text()
    assert text.count(bug.old) == 1
    (library / bug.file).write_text(text.replace(bug.old, bug.new))
    paths = [str(tmp_path), str(HERE), *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"TOKENMIX_NO_KERNELS": "1"}
    asked = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    asked += ["-k", bug.test, str(HERE / f"{bug.suite}.py")]
    done = subprocess.run(asked, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    assert "AssertionError" in done.stdout or "E       assert" in done.stdout, done.stdout[-2000:]
