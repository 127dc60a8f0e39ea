"""Converted hosts of every kind through folders, and in the tools that people use with a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
import transformers
from torch import Tensor, nn

from ranks_surgery import shard
from surgery_models import IMAGES, MAKERS, TRANSLATORS, make, padded, shared
from tokenmix import MixerError
from tokenmix.hosts import load_converted, replace_mixers, save_replaced
from tokenmix.testing.tolerances import BY_DTYPE

KINDS = [name for name in MAKERS if not name.startswith(("timm", "transformer"))]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@torch.no_grad()
def answer(name: str, model: Any) -> Tensor:
    """What a host of this kind answers."""
    ids, mask = padded("left")
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    torch.manual_seed(3)
    if name in IMAGES:
        given = {"pixel_values": torch.randn(2, 3, 32, 32)}
    elif name == "detr":
        given = {"pixel_values": torch.randn(2, 3, 48, 48)}
    elif name == "whisper":
        given = {"input_features": torch.randn(3, 8, 24)}
    if name in TRANSLATORS:
        given |= {"decoder_input_ids": ids.flip(0), "decoder_attention_mask": mask.flip(0)}
    found = model(**given)
    found = found.logits if getattr(found, "logits", None) is not None else found.last_hidden_state
    return found[mask.flip(0).bool() if name in TRANSLATORS else mask.bool()] if "input_ids" in given else found


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_host_is_loaded_as_it_was_saved(name, tmp_path):
    """By save_replaced, and by save_pretrained in several files."""
    host = make(name)
    for key in host._keys_to_ignore_on_save or ():  # tables that transformers computes, and make has drawn
        host.get_parameter(key).data = MAKERS[name]().get_parameter(key)
    model = replace_mixers(host, "hydra", seed=0)[0]
    save_replaced(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    for folder in ("ours", "theirs"):
        loaded = load_converted(tmp_path / folder)
        assert str(loaded) == str(model)
        state = loaded.state_dict()
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
        # weights that are mapped from a file lie on any byte, and torch sums those in another order on some CPUs
        torch.testing.assert_close(answer(name, loaded), answer(name, model), rtol=0, atol=BY_DTYPE[torch.float32])


def trained(model: Any, out: Any, steps: int = 4, **options: Any) -> transformers.Trainer:
    """A Trainer on a few rows of tokens, before its training."""
    texts = torch.randint(3, 50, (8, 6), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in texts]
    options = {"save_steps": 2, "max_steps": steps, "use_cpu": True, "report_to": [], "disable_tqdm": True} | options
    args = transformers.TrainingArguments(str(out), per_device_train_batch_size=4, **options)
    return transformers.Trainer(model, args, train_dataset=data)


def test_a_loaded_model_is_trained_saved_and_resumed(tmp_path):
    """load_converted, Trainer, its checkpoint, load_converted, resume, save_model, load_converted."""
    save_replaced(replace_mixers(shared("gpt2"), {"*.1.*": "hydra"}, seed=0)[0], tmp_path / "start")
    whole = trained(load_converted(tmp_path / "start"), tmp_path / "run")
    whole.train()
    whole.save_model(tmp_path / "saved")
    same = load_converted(tmp_path / "saved")
    assert torch.equal(answer("gpt2", same), answer("gpt2", whole.model.eval()))
    checkpoint = tmp_path / "run" / "checkpoint-2"
    resumed = trained(load_converted(checkpoint), tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    torch.testing.assert_close(resumed.model.eval().state_dict(), same.state_dict())


def test_adapters_of_lora_are_saved_alone_and_merged(tmp_path):
    """Beside a converted folder, which they name; those of a model that has no folder name none."""
    import peft

    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    fresh = replace_mixers(make("llama"), "hydra", seed=0)[0]
    fresh.save_pretrained(tmp_path / "base")
    assert not peft.get_peft_model(copy.deepcopy(fresh), config).peft_config["default"].base_model_name_or_path
    lora = peft.get_peft_model(load_converted(tmp_path / "base"), config).eval()
    lora.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert (answer("llama", lora) - answer("llama", fresh)).abs().max() > 1e-3
    assert torch.equal(answer("llama", again), answer("llama", lora))
    merged = lora.merge_and_unload()
    save_replaced(merged, tmp_path / "merged")
    assert torch.equal(answer("llama", load_converted(tmp_path / "merged")), answer("llama", merged))
    assert (answer("llama", merged) - answer("llama", again)).abs().max() <= 1e-4


def test_a_model_split_over_processes_is_saved_whole(tmp_path):
    model = replace_mixers(make("gpt2"), {"*.1.*": "hydra"}, seed=0)[0]
    save_replaced(model, tmp_path / "one")
    mp.spawn(shard, (str(tmp_path),), nprocs=2)
    assert torch.equal(answer("gpt2", load_converted(tmp_path / "two")), answer("gpt2", model))


@torch.no_grad()
def test_a_loaded_model_compiles(tmp_path):
    save_replaced(replace_mixers(shared("llama"), {"*.1.*": "hydra"}, seed=0)[0], tmp_path / "one")
    model = load_converted(tmp_path / "one")
    ids = padded("left")[0][:1]
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    save_replaced(compiled, tmp_path / "two")
    assert torch.equal(answer("llama", load_converted(tmp_path / "two")), answer("llama", model))


@torch.no_grad()
def test_int8_is_near_and_is_not_saved_as_if_it_were_float(tmp_path):
    model = replace_mixers(shared("bert"), "hydra", seed=0)[0]
    with pytest.warns(DeprecationWarning, match="torch.ao.quantization is deprecated"):
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    exact, near = answer("bert", model), answer("bert", small)
    assert 0 < (near - exact).norm() / exact.norm() < 0.1
    with pytest.raises(MixerError, match=r"is no plain tensor but a [^\n]*; save the model before it is quantised"):
        save_replaced(small, tmp_path / "small")
    assert not (tmp_path / "small").exists()
