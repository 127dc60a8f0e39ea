"""Plant bugs in digits, samplers, loops, ranks, flows and tasks on texts, points and images; a named test notices each.

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
        "outliers are sought before the first layer",
        "anatomy/outliers.py",
        "last = norms.patches[-1]",
        "last = norms.patches[0]",
        "test_anatomy",
        "test_planted_outliers_show_in_all_measures",
    ),
    Bug(
        "a random token is any token",
        "anatomy/probes.py",
        "draws.masked_fill(~mask, -1.0).argmax(1)",
        "draws.argmax(1)",
        "test_anatomy",
        "test_a_random_token_is_one_that_is_marked",
    ),
    Bug(
        "outliers and others are compared on other images",
        "anatomy/probes.py",
        "used = having if outliers else torch.ones_like(having)",
        "used = having | ~mask.any(1) if outliers else torch.ones_like(having)",
        "test_anatomy",
        "test_the_class_is_found_in_the_tokens_that_hold_it",
    ),
    Bug(
        "the penalty of a ridge does not grow with the tokens",
        "anatomy/probes.py",
        "gram.diagonal().add_(strength * n)",
        "gram.diagonal().add_(strength)",
        "test_anatomy",
        "test_ridge_is_that_of_scikit_learn",
    ),
    Bug(
        "a seed resembles the most patches",
        "anatomy/lost.py",
        "order = degrees.argsort(stable=True)",
        "order = (-degrees).argsort(stable=True)",
        "test_anatomy",
        "test_lost_is_its_steps_by_hand",
    ),
    Bug(
        "an object has parts that are not connected",
        "anatomy/lost.py",
        "mask = connected(alike.view(grid), (seed // columns, seed % columns))",
        "mask = alike.view(grid)",
        "test_anatomy",
        "test_lost_finds_a_planted_object",
    ),
    Bug(
        "smoothness counts each pair once and divides by two of them",
        "anatomy/looks.py",
        "/ (pairs * squares)",
        "/ (2 * pairs * squares)",
        "test_anatomy",
        "test_smoothness_is_morans_i",
    ),
    Bug(
        "queries of timm are read before their norm",
        "anatomy/theirs.py",
        "q, k = module.q_norm(q), module.k_norm(k)",
        "q, k = q, module.k_norm(k)",
        "test_anatomy",
        "test_attention_of_timm_and_transformers_is_their_own",
    ),
    Bug(
        "farthest points forget those chosen before the last",
        "models/point_sampling.py",
        "distance = nearest",
        "distance = (points - picked(points, last)).square().sum(-1)",
        "test_points",
        "test_farthest_points_are_those_of_a_literal_form",
    ),
    Bug(
        "farthest points begin at the first point",
        "models/point_sampling.py",
        "last = distance.argmax(1, keepdim=True)",
        "last = distance.argmax(1, keepdim=True) * bool(chosen)",
        "test_points",
        "test_the_classifier_does_not_depend_on_the_order_of_the_points",
    ),
    Bug(
        "neighbours are not seen from their centre",
        "models/points.py",
        "pairs = torch.cat([near - own, own], -1)",
        "pairs = torch.cat([near, own], -1)",
        "test_points",
        "test_neighbour_embedding_is_the_papers_equations_written_out",
    ),
    Bug(
        "labels stay where points are dropped",
        "data/points.py",
        "parts = torch.where(gone, parts[first], parts)",
        "parts = parts.clone()",
        "test_points",
        "test_augmentation_does_what_it_says",
    ),
    Bug(
        "a part that is nowhere counts 0",
        "train/point_task.py",
        "/ union if union else 1.0)",
        "/ max(union, 1))",
        "test_points",
        "test_iou_is_one_for_a_part_that_is_nowhere",
    ),
    Bug(
        "validation draws the clouds of the test",
        "data/points.py",
        "first += 1 << 32",
        "first += 0",
        "test_points",
        "test_held_out_clouds_are_the_same_each_time_and_no_others",
    ),
    Bug(
        "triangles are filled towards a corner",
        "data/point_shapes.py",
        "root = u.sqrt()",
        "root = u",
        "test_points",
        "test_points_of_a_mesh_lie_on_it_evenly",
    ),
    Bug(
        "kept patches are counted from 0",
        "models/vit.py",
        "[prefix, self.config.prefix + keep], 1",
        "[prefix, self.config.prefix + keep.argsort(1)], 1",
        "test_mae",
        "test_kept_positions_are_the_masked_full_sequence",
    ),
    Bug(
        "mask tokens do not know where they stand",
        "models/mae.py",
        "full = full + sincos(",
        "full = full + 0 * sincos(",
        "test_mae",
        "test_predictions_are_the_equation",
    ),
    Bug(
        "patches are divided by their deviation as a whole population",
        "models/mae.py",
        "patches.var(-1, keepdim=True)",
        "patches.var(-1, keepdim=True, unbiased=False)",
        "test_mae",
        "test_the_loss_is_the_equation",
    ),
    Bug(
        "every step hides the same patches",
        "train/masked_image_task.py",
        "generator(self.train.seed, step, MASKS)",
        "generator(self.train.seed, 0, MASKS)",
        "test_mae",
        "test_every_step_hides_other_patches_and_evaluations_the_same",
    ),
    Bug(
        "layer decay does not reach Muon",
        "train/optim.py",
        'group["scale"] *= config.muon_lr / config.lr',
        'group["scale"] = config.muon_lr / config.lr',
        "test_mae",
        "test_layer_decay_holds_under_muon_too",
    ),
    Bug(
        "every image weighs alike in the mIoU",
        "train/segmentation_task.py",
        "confusion += confusion_matrix(logits.argmax(0), truth, classes).cpu()",
        "one = confusion_matrix(logits.argmax(0), truth, classes).cpu()\n"
        "            confusion += one * 720720 // one.sum().clamp_min(1)",
        "test_segmentation_training",
        "test_pixels_are_counted_over_all_images_before_dividing",
    ),
    Bug(
        "pixels to be ignored count as the first class in scores",
        "train/mask_scores.py",
        "counted = truth != IGNORED",
        "truth = truth.clamp_min(0)\n    counted = truth >= 0",
        "test_segmentation_training",
        "test_iou_is_that_of_sets_of_pixels",
    ),
    Bug(
        "the union counts what is right twice",
        "train/mask_scores.py",
        "(confusion.sum(0) + confusion.sum(1) - confusion.diagonal())",
        "(confusion.sum(0) + confusion.sum(1))",
        "test_segmentation_training",
        "test_iou_is_that_of_sets_of_pixels",
    ),
    Bug(
        "pixels to be ignored are learned as the first class",
        "train/segmentation_task.py",
        "nats = F.cross_entropy(outputs.float(), targets, ignore_index",
        "nats = F.cross_entropy(outputs.float(), targets.clamp_min(0), ignore_index",
        "test_segmentation_training",
        "test_the_loss_is_the_mean_over_pixels_with_a_class",
    ),
    Bug(
        "masks are interpolated",
        "data/augment_masks.py",
        'mode="nearest-exact"',
        'mode="bilinear"',
        "test_masks",
        "test_scaled_masks_lie_on_their_images",
    ),
    Bug(
        "masks are half a pixel away from their images",
        "data/augment_masks.py",
        'mode="nearest-exact"',
        'mode="nearest"',
        "test_masks",
        "test_scaled_masks_lie_on_their_images",
    ),
    Bug(
        "images are mirrored without their masks",
        "data/augment_masks.py",
        "x, mask = x.flip(-1), mask.flip(-1)",
        "x = x.flip(-1)",
        "test_masks",
        "test_image_and_mask_move_together",
    ),
    Bug(
        "the margin of a small image is the first class",
        "data/augment_masks.py",
        "F.pad(mask, place, value=IGNORED)",
        "F.pad(mask, place, value=0)",
        "test_masks",
        "test_scaled_masks_lie_on_their_images",
    ),
    Bug(
        "validation scenes are those of training",
        "data/masks.py",
        '"valid": (count, held)',
        '"valid": (0, held)',
        "test_masks",
        "test_splits_of_scenes_share_no_scene",
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
    Bug(
        "gradients are not summed over ranks",
        "parallel/ranks.py",
        "            dist.all_reduce(flat, group=ranks.group)\n",
        "",
        "test_ranks",
        "test_two_ranks_equal_one_process and aft_simple and plain",
    ),
    Bug(
        "the gradient of a shift goes to the right",
        "parallel/messages.py",
        "received = _passed(ctx.group, message, -ctx.by)",
        "received = _passed(ctx.group, message, ctx.by)",
        "test_ranks",
        "test_two_ranks_equal_one_process and lightconv and plain",
    ),
    Bug(
        "a rank counts positions from its own first token",
        "parallel/ranks.py",
        "at = torch.where(count > 0, count + index, at)",
        "at = torch.where(count > 0, index, at)",
        "test_ranks",
        "test_two_ranks_equal_one_process and LM and plain",
    ),
    Bug(
        "the mean is one of means",
        "parallel/ranks.py",
        "return _Shared.apply(total, ranks.group) / targets",
        "return _Shared.apply(total / count, ranks.group) / ranks.ranks",
        "test_ranks",
        "test_two_ranks_equal_one_process and LM and plain",
    ),
    Bug(
        "a flow learns the way back",
        "models/flow.py",
        "return noise - images",
        "return images - noise",
        "test_diffusion",
        "test_a_path_runs_from_images_to_noise_at_its_velocity",
    ),
    Bug(
        "a diffusion transformer is not told the time",
        "models/dit.py",
        "self.waves(TIME_SCALE * time)",
        "self.waves(0 * time)",
        "test_diffusion",
        "test_time_and_class_change_what_a_model_says and aft_simple",
    ),
    Bug(
        "the weight of the guidance is ignored",
        "models/flow.py",
        "return without + weight * (with_class - without)",
        "return with_class",
        "test_diffusion",
        "test_samples_follow_the_guided_velocity",
    ),
    Bug(
        "held-out images are all scored at the last times",
        "train/flow_task.py",
        "yield (k + t) / BUCKETS",
        "yield (BUCKETS - 1 + t) / BUCKETS",
        "test_diffusion",
        "test_held_out_images_are_scored_by_time",
    ),
    Bug(
        "Heun's step is Euler's",
        "models/flow.py",
        "slope = (slope + velocity(x - h * slope, end)) / 2",
        "slope = slope + 0 * velocity(x - h * slope, end)",
        "test_diffusion",
        "test_the_solver_reaches_the_mean_and_the_variance_of_gaussian_images",
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
