"""What check_model finds: nothing in right models, each planted bug; and what `tokenmix check hf:` prints."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from tokenmix import MixerError
from tokenmix.testing import MODEL_PROMISES, ContractError, check_model, main_check
from tokenmix.testing.model_promises import document_lengths

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIG = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "attention_bias": True,
    **TOKENS,
}


def llama(cls=LlamaForCausalLM, **more):
    torch.manual_seed(0)
    return cls(LlamaConfig(**CONFIG | more))


class Broken(LlamaForCausalLM):
    """A model with a bug by name."""

    bug = ""

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        use_cache=None,
        **kwargs,
    ):
        bug, mask = self.bug, attention_mask
        if mask is not None and (bug == "ignores masks" or (bug == "ignores masks at batch 1" and len(mask) == 1)):
            attention_mask = torch.ones_like(mask)
        if bug == "ignores positions":
            position_ids = None
        if bug == "ignores masks of a stream" and cache is not None:
            attention_mask = None
        if bug == "starts anew" and input_ids.shape[1] > 1:
            cache = None
        if bug == "forgets at each token" and input_ids.shape[1] == 1:
            cache = None
        given = {"cache": cache, "use_cache": use_cache, **kwargs}
        out = super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **given)
        if bug == "keeps rows" and out.cache is not None:
            out.cache.reorder_cache = lambda rows: None
        if bug == "sees all" and cache is None:
            out.logits = out.logits + 0.01 * out.logits.mean(1, keepdim=True)
        if bug == "mixes rows":
            out.logits = out.logits + 0.01 * out.logits.mean(0, keepdim=True)
        if bug == "is noisy":
            out.logits = out.logits + 1e-12 * torch.randn_like(out.logits)
        if bug == "has gradients that are not finite":
            out.logits = out.logits + (out.logits - out.logits).abs().sqrt()
        if bug == "overflows":
            out.logits = out.logits + 1e-9 * torch.exp(self.model.layers[0].self_attn.q_proj.bias.float().sum())
        if bug == "overflows in half precision" and out.logits.dtype == torch.bfloat16:
            out.logits = out.logits * float("inf")
        if bug == "ignores interior masks" and mask is not None:
            first = mask.long().argmax(1, keepdim=True)
            index = torch.arange(mask.shape[1])
            whole = (index >= first) & (index <= mask.shape[1] - 1 - mask.flip(1).long().argmax(1, keepdim=True))
            return super().forward(input_ids=input_ids, attention_mask=whole.long(), position_ids=position_ids, **given)
        return out

    def save_pretrained(self, folder, **kwargs):
        super().save_pretrained(folder, **kwargs)
        if self.bug == "saves other weights":
            self.lm_head.weight.data += 1e-6


BUGS = {
    "ignores masks": "left_padding",
    "ignores masks at batch 1": "left_padding",
    "ignores interior masks": "interior_padding",
    "ignores masks of a stream": "decodes_after_left_padding",
    "ignores positions": "packed_by_positions",
    "starts anew": "prefill_in_any_cuts",
    "forgets at each token": "decode_equals_parallel",
    "keeps rows": "beams_reorder",
    "sees all": "no_look_into_the_future",
    "mixes rows": "rows_are_independent",
    "is noisy": "same_twice",
    "has gradients that are not finite": "gradients_are_finite",
    "overflows": "gradients_at_large_biases",
    "overflows in half precision": "finite_in_bfloat16",
    "saves other weights": "saves_and_loads",
}


def test_llama_keeps_every_promise():
    model = llama()
    before = [p.clone() for p in model.parameters()]
    report = check_model(model, perturb=True)
    assert {r.status for r in report.results} == {"kept"}
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug, monkeypatch):
    monkeypatch.setattr(Broken, "bug", bug)
    with pytest.raises(ContractError) as found:
        check_model(llama(Broken), perturb=True, promises=[BUGS[bug]])
    assert found.value.report.failures[0].status == "broken"


def test_the_smallest_input_comes_first(monkeypatch):
    monkeypatch.setattr(Broken, "bug", "ignores masks")
    with pytest.raises(ContractError, match=r"FAIL  left_padding: .*mask=011; masked='the pad token'"):
        check_model(llama(Broken), perturb=True, promises=["left_padding"])


def test_a_mask_of_float64_that_is_not_finite_is_no_failure():
    """Eager attention turns the least number of float64 into -inf, and a row without keys into NaN."""
    model = llama(attn_implementation="eager")
    assert check_model(model, perturb=True, promises=["left_padding"]).results[0].status == "kept"


def test_an_error_of_the_model_is_a_refusal_and_a_crash_a_failure(monkeypatch):
    def refuse(self, **given):
        raise ValueError("packed rows are not supported")

    def crash(self, **given):
        return torch.zeros(2) @ torch.zeros(3)

    model = llama()
    for forward, status in ((refuse, "refused"), (crash, "crashed")):
        own = type("Own", (LlamaForCausalLM,), {"forward": lambda self, input_ids=None, position_ids=None, **k: 0})
        calls = []

        def once(self, input_ids=None, position_ids=None, *, forward=forward, calls=calls, **given):
            calls.append(1)
            packed = position_ids is not None and bool((position_ids.diff(dim=-1) != 1).any())
            return forward(self) if packed else LlamaForCausalLM.forward(self, input_ids, **given)

        own.forward = once
        other = own(model.config)
        try:
            report = check_model(other, promises=["packed_by_positions"])
        except ContractError as error:
            report = error.report
        assert report.results[0].status == status
    assert "packed rows are not supported" not in str(report)


def test_encoder_decoders_read_padded_sources():
    torch.manual_seed(0)
    config = T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    report = check_model(T5ForConditionalGeneration(config), perturb=True)
    assert report.status("right_padding") == report.status("beams_reorder") == "kept"
    assert report.status("left_padding") == report.status("packed_by_positions") == "not applicable"


def test_lengths_of_documents_are_those_of_transformers():
    rows = [{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}]
    theirs = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    ours = document_lengths((2, 3))
    for name, value in ours.items():
        assert torch.equal(torch.as_tensor(theirs[name]), torch.as_tensor(value)), name


def test_other_models_are_refused():
    with pytest.raises(MixerError, match="Linear is not a model of transformers, or of timm"):
        check_model(nn.Linear(2, 2))
    with pytest.raises(MixerError, match="no promise of models is called 'speed'"):
        check_model(llama(), promises=["speed"])


class TestCommand:
    def test_a_folder_with_a_config_alone(self, tmp_path, capsys, monkeypatch):
        LlamaConfig(**CONFIG, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
        assert main_check(f"hf:{tmp_path}", {"num_hidden_layers": 1}) == 0
        said = capsys.readouterr().out
        assert f"hf:{tmp_path}, decoder, random weights, float64" in said
        assert f"{len(MODEL_PROMISES)} kept, 0 broken, 0 not applicable or waived" in said

    def test_a_folder_with_weights_as_json(self, tmp_path, capsys):
        llama(num_hidden_layers=1).save_pretrained(tmp_path)
        capsys.readouterr()
        assert main_check(f"hf:{tmp_path}", {}, json=True) == 0
        (report,) = json.loads(capsys.readouterr().out)
        assert "its own weights" in report["subject"]
        assert [r["promise"] for r in report["results"]] == list(MODEL_PROMISES)
        with pytest.raises(MixerError, match="has weights, which fix its config; leave hidden_size out of --options"):
            main_check(f"hf:{tmp_path}", {"hidden_size": 8})

    def test_a_model_of_timm(self, capsys):
        options = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 2}
        assert main_check("timm:vit_tiny_patch16_224", options) == 0
        assert "rows_are_independent" in capsys.readouterr().out

    def test_what_cannot_be_checked_is_one_line(self, tmp_path):
        with pytest.raises(MixerError, match=r"config\.json is missing"):
            main_check(f"hf:{tmp_path}", {})
        (tmp_path / "config.json").write_text('{"model_type": "no_such"}')
        with pytest.raises(MixerError, match="transformers cannot build the model of"):
            main_check(f"hf:{tmp_path}", {})
        with pytest.raises(MixerError, match="has no model 'no_such'"):
            main_check("timm:no_such", {})
        with pytest.raises(MixerError, match="--reference is for layers"):
            main_check("timm:vit_tiny_patch16_224", {}, reference="a:b")
