"""The defects of public models that docs/conformance.md lists, each shown by calls of transformers alone.

One of these tests fails where a defect has been mended: then record the page anew and remove the test.
"""

from __future__ import annotations

import json

import pytest
import torch

from conformance import FUNCTIONS, MODELS, RESULTS, TIMM, build_public
from tokenmix.testing.model_subject import perturb_model

MIXED = ("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear", "bamba", "falcon_h1", "granitemoehybrid")
MIXED += ("nemotron_h", "zamba2", "lfm2", "jamba", "minimax", "recurrent_gemma")
"""Models that take position_ids which start anew, and mix the documents."""
UNTOLD = ("gpt_oss", "opt")
"""Transformers that do not pass position_ids on to their masks."""
HOLES = (*MIXED, "mamba", "mamba2", "falcon_mamba")
"""Models whose convolutions or decays count masked places in between."""
BEGUN = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def found():
    return json.loads(RESULTS.read_text())


def build(name, **config):
    kept = dict(MODELS[name].fields)
    MODELS[name].fields.update(config)
    try:
        return perturb_model(build_public(name), seed=0).eval()
    finally:
        MODELS[name].fields.clear()
        MODELS[name].fields.update(kept)


def draw(rows, length):
    return torch.randint(1, 31, (rows, length), generator=torch.Generator().manual_seed(1))


def logits(model, ids, **given):
    with torch.no_grad():
        return model(input_ids=ids, **given).logits


def gap(a, b):
    return float((a - b).abs().max() / b.abs().max())


def broken(found, promise):
    return {
        name
        for name, report in found["models"].items()
        if any(r["promise"] == promise and r["status"] in ("broken", "crashed") for r in report["results"])
    }


def test_the_page_names_every_model_and_function(found):
    assert list(found["models"]) == [*MODELS, *TIMM]
    assert list(found["functions"]) == list(FUNCTIONS)


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba"])
def test_several_tokens_after_a_cache_start_from_an_empty_state(name, found):
    assert name in broken(found, "prefill_in_any_cuts")
    model, ids = build(name), draw(1, 6)
    with torch.no_grad():
        first = model(input_ids=ids[:, :3], use_cache=True)
    later = logits(model, ids[:, 3:], cache=first.cache, use_cache=True)
    assert gap(later, logits(model, ids)[:, 3:]) > 1e-3


def test_generate_in_chunks_of_a_prompt_gives_other_logits_in_jamba():
    model, ids = build("jamba"), draw(1, 6)
    told = {**BEGUN, "output_logits": True, "return_dict_in_generate": True}
    whole, cut = (model.generate(ids, **told, **more) for more in ({}, {"prefill_chunk_size": 2}))
    assert gap(cut.logits[0], whole.logits[0]) > 1e-3


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_decoding_does_not_raise_small_steps_to_time_step_min(name, found):
    assert name in broken(found, "decode_equals_parallel")
    gaps = []
    for least in (1e-12, 0.1):
        model, ids = build(name, time_step_min=least), draw(1, 5)
        with torch.no_grad():
            first = model(input_ids=ids[:, :4], use_cache=True)
        gaps.append(gap(logits(model, ids[:, 4:], cache=first.cache, use_cache=True), logits(model, ids)[:, 4:]))
    assert gaps[0] < 1e-5
    assert gaps[1] > 1e-4


def test_beams_of_minimax_keep_the_states_of_other_beams(found):
    assert "minimax" in broken(found, "beams_reorder")
    model, ids = build("minimax"), draw(1, 6)
    told = {**BEGUN, "max_new_tokens": 12, "output_scores": True, "return_dict_in_generate": True}
    best = model.generate(ids, num_beams=6, length_penalty=0.0, **told)
    again = logits(model, best.sequences)[0, 5:-1].log_softmax(-1).gather(1, best.sequences[0, 6:, None]).sum()
    assert abs(float(best.sequences_scores[0]) - float(again)) > 1e-2


def test_minimax_misplaces_the_mask_after_left_padding(found):
    assert "minimax" in broken(found, "decodes_after_left_padding")
    model, ids = build("minimax"), draw(1, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    told = {**BEGUN, "output_logits": True, "return_dict_in_generate": True}
    padded = model.generate(ids, attention_mask=mask, **told)
    alone = model.generate(ids[:, 2:], **told)
    assert gap(padded.logits[0], alone.logits[0]) < 1e-5
    assert gap(padded.logits[1], alone.logits[1]) > 1e-2


def test_rwkv_decodes_two_rows_into_each_other(found):
    assert "rwkv" in broken(found, "decode_equals_parallel")
    model, ids = build("rwkv"), draw(2, 4)
    told = {**BEGUN, "output_logits": True, "return_dict_in_generate": True}
    both, alone = model.generate(ids, **told), model.generate(ids[:1], **told)
    assert gap(both.logits[0][:1], alone.logits[0]) < 1e-5
    assert gap(both.logits[1][:1], alone.logits[1]) > 1e-2


@pytest.mark.parametrize("name", ["rwkv", "recurrent_gemma"])
def test_recurrent_layers_read_left_padding(name, found):
    assert name in broken(found, "left_padding")
    model, ids = build(name), draw(1, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    positions = {} if name == "rwkv" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    assert gap(logits(model, ids, attention_mask=mask, **positions)[:, 2:], logits(model, ids[:, 2:])) > 1e-2


def test_the_gate_of_kimi_linear_has_gradients_that_are_not_finite(found):
    assert "kimi_linear" in broken(found, "gradients_at_large_biases")
    model = build("kimi_linear")
    with torch.no_grad():
        model.model.layers[0].self_attn.forget_gate.dt_bias.fill_(100.0)
    loss = model(input_ids=draw(1, 3)).logits.square().sum()
    loss.backward()
    assert bool(loss.isfinite())
    assert not bool(model.model.embed_tokens.weight.grad.isfinite().all())


@pytest.mark.parametrize("name", [*MIXED, *UNTOLD])
def test_position_ids_that_start_anew_do_not_part_documents(name, found):
    assert broken(found, "packed_by_positions") == {*MIXED, *UNTOLD}
    model, ids = build(name), draw(1, 5)
    packed = logits(model, ids, position_ids=torch.tensor([[0, 1, 0, 1, 2]]), use_cache=False)
    assert gap(packed[:, 2:], logits(model, ids[:, 2:], use_cache=False)) > 1e-2


UNREAD = ("jamba", "minimax", "recurrent_gemma", *UNTOLD)


@pytest.mark.parametrize("name", UNREAD)
def test_lengths_of_documents_are_taken_and_not_read(name, found):
    assert broken(found, "packed_by_lengths") == set(UNREAD)
    model, ids = build(name), draw(1, 5)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    told = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 3, "max_length_k": 3}
    told |= {"seq_idx": torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)}
    packed = logits(model, ids, position_ids=torch.tensor([[0, 1, 0, 1, 2]]), use_cache=False, **told)
    assert gap(packed[:, 2:], logits(model, ids[:, 2:], use_cache=False)) > 1e-2


@pytest.mark.parametrize("name", HOLES)
def test_masked_places_in_between_change_a_row(name, found):
    assert broken(found, "interior_padding") == {*HOLES, "gemma3", "modernbert", "rwkv"}
    model, ids = build(name), draw(1, 5)
    mask = torch.tensor([[1, 1, 0, 1, 1]])
    positions = {} if "mamba" in name else {"position_ids": torch.tensor([[0, 1, 0, 2, 3]])}
    got = logits(model, ids, attention_mask=mask, **positions)[:, mask[0].bool()]
    assert gap(got, logits(model, ids[:, mask[0].bool()])) > 1e-3


@pytest.mark.parametrize("name", ["gemma3", "modernbert"])
def test_windows_count_masked_places(name):
    model, ids = build(name), draw(1, 6)
    mask = torch.tensor([[1, 0, 0, 0, 0, 1]])
    got = logits(model, ids, attention_mask=mask, position_ids=torch.tensor([[0, 0, 0, 0, 0, 1]]))
    assert gap(got[:, [0, 5]], logits(model, ids[:, [0, 5]])) > 1e-2


def test_eager_attention_in_float64_makes_rows_without_keys_nan():
    model, ids = build("llama").double(), draw(1, 4)
    model.set_attn_implementation("eager")
    mask = torch.tensor([[0, 1, 1, 1]])
    assert bool(logits(model, ids, attention_mask=mask).isnan().any())
    assert bool(logits(model.float(), ids, attention_mask=mask).isfinite().all())


def test_the_chunked_forms_lose_digits_after_a_token_that_forgets_everything(found):
    names = {n for n, r in found["functions"].items() if any(x["status"] == "broken" for x in r["results"])}
    assert names == {"torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"}
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as chunked
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as one_by_one

    q, k, v = (torch.randn(1, 6, 2, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    g, beta = -torch.rand(1, 6, 2, generator=torch.Generator().manual_seed(3)), torch.full((1, 6, 2), 0.5)
    g[:, 2] = -1e4
    want = one_by_one(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
    assert gap(chunked(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0], want) > 5e-5
