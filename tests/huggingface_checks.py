"""Check what must hold of our models in transformers.

Checks are functions that raise AssertionError where it does not hold. They use an initializer_range of 0.5: at
transformers' 0.02 the mixers hardly show in the logits, and a halved state or a dropped mask would pass.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from perturb import perturb_mixers

LOCAL = {"name": "aft_local", "window": 4, "rank": 3}
KINDS: dict[str, list[dict[str, Any]]] = {
    "aft": [LOCAL, {"name": "aft_simple"}, {"name": "aft_full", "rank": 3}],
    "hydra": [{"name": "hydra"}],
    "hybrid": [LOCAL, {"name": "hydra"}, {"name": "attention"}],
    "recurrent": [{"name": "short_conv"}, {"name": "gated_delta", "heads": 2}, {"name": "mamba2", "heads": 2}],
    "rotary": [{"name": "aft_simple"}, {"name": "attention", "positions": {"name": "rotary"}}],
}
PADS = (3, 6, 0)


def config(mixers: Any = "aft", **options: Any) -> Any:
    """A small config whose weights are large."""
    from tokenmix.hosts.huggingface import TokenMixConfig

    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 40,
    }
    return TokenMixConfig(
        **{
            **sizes,
            "mixers": KINDS[mixers] if isinstance(mixers, str) else mixers,
            "initializer_range": 0.5,
            "pad_token_id": 0,
            **options,
        }
    )


def causal(kind: Any = "aft", **options: Any) -> Any:
    from tokenmix.hosts.huggingface import TokenMixForCausalLM

    torch.manual_seed(0)
    return perturb_mixers(TokenMixForCausalLM(config(kind, **options)))


def tokens(rows: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(1, 40, (rows, length), generator=torch.Generator().manual_seed(1))


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens with padding on the left, and their attention_mask."""
    mask = torch.stack([torch.arange(12) >= n for n in PADS]).long()
    return tokens() * mask, mask


def close(got: torch.Tensor, wanted: torch.Tensor, atol: float = 2e-5) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)


def chunks(
    model: Any, x: torch.Tensor, cuts: list[int], mask: torch.Tensor | None = None, cache: Any = None
) -> tuple[torch.Tensor, Any]:
    out = []
    for a, b in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        found = model(x[:, a:b], attention_mask=None if mask is None else mask[:, :b], cache=cache, use_cache=True)
        cache = found.past_key_values
        out.append(found.logits)
    return torch.cat(out, 1), cache


@torch.no_grad()
def streamed_equals_full(kind: str) -> None:
    """Logits in chunks through the cache are those of the whole sequence."""
    model, x = causal(kind), tokens()
    full = model(x, use_cache=False).logits
    assert full.std() > 0.5, "the mixers must show"
    for cuts in ([4, 5, 9], list(range(1, 12))):
        close(chunks(model, x, cuts)[0], full)


@torch.no_grad()
def generation_needs_no_cache(kind: str) -> None:
    """Greedy and three beams write the same with a cache as without; a prompt read in chunks, too."""
    model, x = causal(kind), tokens()
    for how in ({}, {"num_beams": 3, "length_penalty": 0.0}):
        options = {"max_new_tokens": 10, "do_sample": False, **how}
        wanted = model.generate(x, use_cache=False, **options)
        assert torch.equal(model.generate(x, **options), wanted), how
    assert torch.equal(
        model.generate(x, max_new_tokens=10, do_sample=False, prefill_chunk_size=5),
        model.generate(x, max_new_tokens=10, do_sample=False),
    )


@torch.no_grad()
def left_padding_changes_nothing(kind: str) -> None:
    """Each row of a batch padded on the left has the logits, and the continuation, of its sequence alone."""
    model, (x, mask) = causal(kind), padded()
    full, streamed = model(x, attention_mask=mask, use_cache=False).logits, chunks(model, x, [2, 4, 5, 11], mask)[0]
    written = model.generate(x, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for row, n in enumerate(PADS):
        alone = x[row : row + 1, n:]
        wanted = model(alone, use_cache=False).logits[0]
        close(full[row, n:], wanted)
        close(streamed[row, n:], wanted)
        assert torch.equal(written[row, n:], model.generate(alone, max_new_tokens=8, do_sample=False)[0])


@torch.no_grad()
def right_padding_changes_nothing(kind: str) -> None:
    """Each row of a batch padded on the right has the logits of its sequence alone."""
    from tokenmix.hosts.huggingface import TokenMixForMaskedLM

    torch.manual_seed(0)
    x, mask = tokens(), padded()[1].flip(1)
    both_sides = [] if kind == "recurrent" else [perturb_mixers(TokenMixForMaskedLM(config(kind)))]
    for model in (causal(kind), *both_sides):
        got = model(x * mask, attention_mask=mask).logits
        for row, n in enumerate(PADS):
            close(got[row, : 12 - n], model(x[row : row + 1, : 12 - n]).logits[0])


@torch.no_grad()
def tokens_are_given_back(kind: str) -> None:
    """Check that after a cut, within chunks and across them, a padded batch goes on as if the tokens had never come.

    So assisted decoding writes the same.
    """
    from transformers import DynamicCache

    model, (x, mask) = causal(kind), padded()
    full = model(x, attention_mask=mask, use_cache=False).logits
    for cuts, back in (([8, 10], 1), ([7, 9, 10], 3), ([9], 2)):
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        _, cache = chunks(model, x[:, : cuts[-1]], cuts[:-1], mask, cache)
        cache.crop(-back)
        at = cuts[-1] - back
        got = model(x[:, at:], attention_mask=mask, cache=cache, use_cache=True).logits
        for row, n in enumerate(PADS):
            close(got[row, max(n - at, 0) :], full[row, max(n, at) :])
    prompt, how = tokens(1, 7), {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=3, **how), model.generate(prompt, **how))


@torch.no_grad()
def rows_of_a_cache_can_be_picked(kind: str) -> None:
    """After reorder, batch select and repeat, rows go on as those they came from, at their own positions."""
    model, (x, mask) = causal(kind), padded()
    _, cache = chunks(model, x, [], mask)
    new, order = tokens(3, 4).flip(0), torch.tensor([2, 0, 0])
    for pick, rows in (
        (lambda c: c.reorder_cache(order), order),
        (lambda c: c.batch_select_indices(torch.tensor([1, 2])), torch.tensor([1, 2])),
        (lambda c: c.batch_repeat_interleave(2), torch.arange(3).repeat_interleave(2)),
    ):
        picked = copy.deepcopy(cache)
        pick(picked)
        assert picked.batch_size == len(rows)
        more = new[:1].expand(len(rows), -1)
        whole, whole_mask = (
            torch.cat([x[rows], more], 1),
            torch.cat([mask[rows], torch.ones(len(rows), 4, dtype=torch.long)], 1),
        )
        got = model(more, attention_mask=whole_mask, cache=picked).logits
        close(got, model(whole, attention_mask=whole_mask, use_cache=False).logits[:, -4:])


@torch.no_grad()
def saved_is_loaded(kind: str) -> None:
    """Check that a saved model, loaded by its own class and by Auto classes, gives the same logits.

    from_pretrained loads it, and a meta build leaves nothing undone.
    """
    from transformers import AutoModelForCausalLM

    model, x = causal(kind, tie_word_embeddings=True), tokens()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for cls in (type(model), AutoModelForCausalLM):
            loaded = cls.from_pretrained(folder)
            assert torch.equal(loaded(x).logits, model(x).logits)
            assert loaded.config.mixers == model.config.mixers


CHECKS: dict[str, Callable[[str], None]] = {
    f.__name__: f
    for f in (
        streamed_equals_full,
        generation_needs_no_cache,
        left_padding_changes_nothing,
        right_padding_changes_nothing,
        tokens_are_given_back,
        rows_of_a_cache_can_be_picked,
        saved_is_loaded,
    )
}
