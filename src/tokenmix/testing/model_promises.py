"""The promises of whole models: padding, packing, caches, beams, time, rows, gradients, saving."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from . import inputs
from .model_subject import MASKED, ModelSubject, first_tensor, positions_of
from .report import Broken, NotApplicable, fail, finite, same

LIVE = ((2,), (3,), (6,), (2, 3), (4, 6))
"""The live tokens of the rows of padded inputs, the smallest first."""
CUTS = ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1, 2), (3, 4), (6, 3, 1, 5), (66, 5))
"""Cuts of a sequence into chunks, the smallest first; the last is longer than the chunks that recurrences take."""
PACKED = ((1, 1), (1, 2), (2, 1), (3, 2), (2, 5, 1), (5, 4, 3))
"""The lengths of documents in one row, the smallest first."""
LARGE = 100.0
"""The size of biases at which exp() of one overflows in float32, while softplus or sigmoid of it does not."""


def _masks(side: str) -> Iterator[Tensor]:
    """Yield masks (B, T), True = live, with one padded place, and with several in each row."""
    for live in LIVE:
        for extra in (1, 3):
            width = max(live) + extra
            rows = []
            for n in live:
                index = torch.arange(width)
                kept = {"left": index >= width - n, "right": index < n}
                middle = (index < n - n // 2) | (index >= width - n // 2)
                rows.append(kept.get(side, middle))
            yield torch.stack(rows)


def _masked_inputs(s: ModelSubject, side: str) -> Iterator[tuple[Tensor, Tensor, str]]:
    """Yield ids (B, T), masks, and what stands at the masked places."""
    if "attention_mask" not in s.takes:
        raise NotApplicable("its forward takes no attention_mask")
    for mask in _masks(side):
        ids, other = (s.draw(*mask.shape, stream=i) for i in (0, 1))
        for filled in MASKED[s.pad is None :]:
            pad = torch.full_like(ids, s.pad or 0) if filled == MASKED[0] else other
            yield torch.where(mask, ids, pad), mask, filled


def _check_padding(s: ModelSubject, side: str) -> None:
    if side != "right" and s.kind != "decoder" and "position_ids" not in s.takes:
        raise NotApplicable("it takes no positions, so its rows begin with their first token")
    for ids, mask, filled in _masked_inputs(s, side):
        got = s.read(ids, mask)
        for row, kept in enumerate(mask):
            alone = ids[row][kept][None]
            want = s.read(alone, torch.ones_like(alone, dtype=torch.bool))
            mine = got[row : row + 1, : want.shape[1]]
            what = "a padded row differs from the row alone"
            s.same(mine, want, what, start=0, in_row=row, mask=mask, masked=filled)


def left_padding(s: ModelSubject) -> None:
    """A row padded at the left equals the row alone, also in a batch of one."""
    _check_padding(s, "left")


def right_padding(s: ModelSubject) -> None:
    """A row padded at the right equals the row alone, also in a batch of one."""
    _check_padding(s, "right")


def interior_padding(s: ModelSubject) -> None:
    """A row with masked places in between equals the row without them, as where turns of a batch are joined."""
    _check_padding(s, "interior")


def decodes_after_left_padding(s: ModelSubject) -> None:
    """Tokens decoded after prompts padded at the left equal those decoded after each prompt alone."""
    _must_decode(s)
    if s.kind == "encoder-decoder":
        raise NotApplicable("prompts are read by its encoder")
    for ids, mask, filled in _masked_inputs(s, "left"):
        new = s.draw(len(ids), 3, stream=2)
        whole = torch.cat([mask, torch.ones_like(new, dtype=torch.bool)], 1)
        got = _stream(s, torch.cat([ids, new], 1), (ids.shape[1], 1, 1, 1), whole)[:, -4:]
        for row, kept in enumerate(mask):
            n = int(kept.sum())
            want = _stream(s, torch.cat([ids[row][kept], new[row]])[None], (n, 1, 1, 1))[:, -4:]
            what = "a decoded token differs from that of the prompt alone"
            s.same(got[row : row + 1], want, what, start=n - 1, in_row=row, mask=mask, masked=filled)


def _must_decode(s: ModelSubject) -> None:
    if s.kind in ("encoder", "images"):
        raise NotApplicable("it reads whole sequences and decodes nothing")


def _places(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


def _stream(s: ModelSubject, ids: Tensor, cuts: tuple[int, ...], mask: Tensor | None = None) -> Tensor:
    """Return the outputs of a sequence that is given in chunks, all with a mask or all without."""
    parts, cache = [], None
    positions = _places(ids) if mask is None else positions_of(mask)
    for start, end in pairwise(accumulate(cuts, initial=0)):
        out = s.step(ids[:, start:end], None if mask is None else mask[:, :end], positions[:, start:end], cache)
        cache = s.cache_of(out)
        parts.append(first_tensor(out))
    return torch.cat(parts, 1)


def _streams(s: ModelSubject, every: tuple[tuple[int, ...], ...]) -> None:
    _must_decode(s)
    for cuts in every:
        if sum(cuts) > getattr(s.model.config, "max_position_embeddings", sum(cuts)):
            continue
        for rows in (1, 2):
            ids = s.draw(rows, sum(cuts))
            want = s.outputs(ids, None, _places(ids))
            s.same(_stream(s, ids, cuts), want, "differs from the parallel form", start=0, cuts=cuts, rows=rows)


def decode_equals_parallel(s: ModelSubject) -> None:
    """A prompt and then one token at a time equals the parallel form."""
    _streams(s, ((1, 1), (2, 1, 1), (5, *[1] * 6), (66, 1, 1)))


def prefill_in_any_cuts(s: ModelSubject) -> None:
    """A prompt given in chunks of any lengths equals the prompt in one."""
    _streams(s, CUTS)


def beams_reorder(s: ModelSubject) -> None:
    """After ``cache.reorder_cache(rows)``, each row goes on as the row that it was."""
    _must_decode(s)
    for length, order in ((1, (1, 0)), (3, (1, 1)), (5, (2, 0, 1))):
        ids, new = s.draw(len(order), length), s.draw(len(order), 2, stream=3)
        cache = s.cache_of(s.step(ids, None, _places(ids), None))
        if not hasattr(cache, "reorder_cache"):
            raise NotApplicable(f"its cache, a {type(cache).__name__}, has no reorder_cache")
        cache.reorder_cache(torch.tensor(order))
        picked = torch.cat([ids[list(order)], new], 1)
        got = []
        for at in (length, length + 1):
            out = s.step(picked[:, at : at + 1], None, _places(picked)[:, at : at + 1], cache)
            cache = s.cache_of(out)
            got.append(first_tensor(out))
        want = _stream(s, picked, (length, 1, 1))[:, length:]
        s.same(
            torch.cat(got, 1),
            want,
            "a reordered row differs from the row that it was",
            start=length,
            order=order,
            prompt=length,
        )


def _check_packing(s: ModelSubject, *, lengths_too: bool) -> None:
    if s.kind != "decoder":
        raise NotApplicable("only decoders have an agreed form of packed documents")
    if "position_ids" not in s.takes:
        raise NotApplicable("its forward takes no position_ids")
    if lengths_too and not s.takes_any:
        raise NotApplicable("its forward takes no lengths of documents")
    for lengths in PACKED:
        ids = s.draw(1, sum(lengths))
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        got = s.outputs(ids, None, positions, **(document_lengths(lengths) if lengths_too else {}))
        apart = [s.outputs(doc, None, _places(doc)) for doc in ids.split(lengths, 1)]
        s.same(got, torch.cat(apart, 1), "packed documents differ from documents apart", start=0, lengths=lengths)


def document_lengths(lengths: tuple[int, ...]) -> dict[str, object]:
    """Return the arguments that transformers' DataCollatorWithFlattening can add to position_ids."""
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    index = torch.cat([torch.full((n,), i, dtype=torch.int32) for i, n in enumerate(lengths)])[None]
    longest = {f"max_length_{a}": max(lengths) for a in "qk"}
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, **longest, "seq_idx": index}


def packed_by_positions(s: ModelSubject) -> None:
    """Documents in one row, told by position_ids that start anew, equal the documents apart."""
    _check_packing(s, lengths_too=False)


def packed_by_lengths(s: ModelSubject) -> None:
    """Documents in one row, told by position_ids, cu_seq_lens and seq_idx, equal the documents apart."""
    _check_packing(s, lengths_too=True)


def no_look_into_the_future(s: ModelSubject) -> None:
    """Later tokens change no earlier output."""
    _must_decode(s)
    for length in (2, 5, 9):
        ids, other = s.draw(1, length), s.draw(1, length, stream=4)
        for seen in range(1, length):
            changed = torch.cat([ids[:, :seen], other[:, seen:]], 1)
            got, want = (s.outputs(a, None, _places(a))[:, :seen] for a in (changed, ids))
            s.same(got, want, "a later token changes an earlier output", start=0, tokens=length, changed_from=seen)


def rows_are_independent(s: ModelSubject) -> None:
    """A row of a batch equals the row alone."""
    for rows in (2, 3):
        x = s.images(rows) if s.kind == "images" else s.draw(rows, 5)
        whole = s.outputs(x)
        for row in range(rows):
            s.same(whole[row : row + 1], s.outputs(x[row : row + 1]), "a row differs from the row alone", in_row=row)


def same_twice(s: ModelSubject) -> None:
    """In eval mode the same input gives the same bits, whatever was computed in between."""
    x, other = (s.images(2, stream=i) if s.kind == "images" else s.draw(2, 5, stream=i) for i in (0, 5))
    want = s.outputs(x).clone()
    s.outputs(other)
    same(s.outputs(x), want, "the second call on one input differs from the first", tol=0.0)


def _gradients(s: ModelSubject, what: str, x: Tensor, mask: Tensor | None = None) -> None:
    """Compare every gradient of a weighted sum of the outputs of live tokens with a finite number."""
    with torch.enable_grad():
        if s.kind == "images":
            y = first_tensor(s.model(x))
        elif mask is None or s.kind == "encoder-decoder":
            y = first_tensor(s.call(x))
        else:
            y = first_tensor(s.call(x, mask, positions_of(mask)))
        live = y if mask is None or s.kind == "encoder-decoder" else y[mask]
        finite(live, f"{what}: the outputs", mask=mask)
        s.model.zero_grad()
        (live * inputs.noise(*live.shape, seed=9).to(live)).sum().backward()
    for name, p in s.model.named_parameters():
        if p.grad is not None:
            finite(p.grad, f"{what}: the gradient of {name}", mask=mask)


def gradients_are_finite(s: ModelSubject) -> None:
    """In float32 every gradient is finite, with padding at the left too."""
    small = s.copy_to(torch.float32)
    if s.kind == "images":
        _gradients(small, "in float32", small.images(2))
        return
    _gradients(small, "in float32", s.draw(2, 5))
    if "attention_mask" in s.takes:
        _gradients(small, "padded", s.draw(2, 6), inputs.key_masks(6)["left"])


def gradients_at_large_biases(s: ModelSubject) -> None:
    """In float32 outputs and gradients are finite where one bias of the model is 100, or -100: one of each kind."""
    biases = [name for name, p in s.model.named_parameters() if p.ndim == 1 and name.endswith("bias")]
    names = list({re.sub(r"\d+", "", name): name for name in reversed(biases)}.values())[::-1]
    if not names:
        raise NotApplicable("it has no biases")
    small = s.copy_to(torch.float32)
    x = small.images(1) if s.kind == "images" else s.draw(1, 3)
    for name in names:
        p = small.model.get_parameter(name)
        kept = p.detach().clone()
        for size in (LARGE, -LARGE):
            with torch.no_grad():
                p.fill_(size)
            _gradients(small, f"{name} = {size:g}", x)
        with torch.no_grad():
            p.copy_(kept)


def saves_and_loads(s: ModelSubject) -> None:
    """A model in float32 that is saved and loaded has the same weights and outputs."""
    small = s.copy_to(torch.float32)
    if s.kind == "images":
        other = s.copy_to(torch.float32)
        with torch.no_grad():
            for p in other.model.parameters():
                p.zero_()
        other.model.load_state_dict(small.model.state_dict())
        same(other.outputs(small.images(1)), small.outputs(small.images(1)), "the outputs after load_state_dict differ")
        return
    with tempfile.TemporaryDirectory() as folder:
        small.model.save_pretrained(folder)
        loaded = type(s.model).from_pretrained(folder, dtype=torch.float32).eval()
    before, after = small.model.state_dict(), loaded.state_dict()
    for name in before.keys() ^ after.keys():
        fail(f"{name} is in the model saved or in the one loaded, not in both")
    for name, tensor in before.items():
        same(after[name].to(tensor), tensor, f"{name} is loaded with other numbers", tol=0.0)
    x = s.draw(1, 5)
    same(replace(small, model=loaded).outputs(x), small.outputs(x), "the outputs after loading differ")


def finite_in_bfloat16(s: ModelSubject) -> None:
    """In bfloat16 the outputs are finite."""
    small = s.copy_to(torch.bfloat16)
    y = small.outputs(small.images(1) if s.kind == "images" else s.draw(1, 5))
    if y.dtype not in (torch.bfloat16, torch.float32):
        raise Broken(f"the outputs are {y.dtype}")
    finite(y, "the outputs")
