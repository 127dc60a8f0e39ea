"""What save_pretrained and Trainer write of a host with mixers: transformers loads it right, or refuses it."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from surgery_models import make, shared
from tokenmix import MixerError
from tokenmix.hosts.surgery import load_converted, replace_mixers, restore, save_replaced
from tokenmix.system import torchvision as system_torchvision
from tokenmix.testing.tolerances import BY_DTYPE

AUTO = {
    "llama": transformers.AutoModelForCausalLM,
    "gpt2": transformers.AutoModelForCausalLM,
    "bert": transformers.AutoModel,
    "vit": transformers.AutoModelForImageClassification,
    "bart": transformers.AutoModelForSeq2SeqLM,
}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def converted(name):
    spec = {"name": "hydra"} if name == "bart" else [{"name": "aft_full", "rank": 4}, "performer"]
    return replace_mixers(shared(name), spec, seed=0)[0]


def given(name):
    return torch.linspace(-1, 1, 3072).view(1, 3, 32, 32) if name == "vit" else torch.arange(3, 12)[None]


def same(a, b):
    assert type(a) is type(b)
    ours = b.state_dict()
    assert a.state_dict().keys() == ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in a.state_dict().items())


@pytest.mark.parametrize("name", AUTO)
@torch.no_grad()
def test_what_save_pretrained_writes_is_loaded(name, tmp_path):
    """By the Auto class, by ours, in several files, and after a second save."""
    model = converted(name)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="8KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    loaded = [AUTO[name].from_pretrained(tmp_path / folder) for folder in ("one", "many")]
    loaded += [load_converted(tmp_path / folder) for folder in ("one", "many")]
    loaded[0].save_pretrained(tmp_path / "again")
    for each in (*loaded, AUTO[name].from_pretrained(tmp_path / "again")):
        same(each, model)
        found, want = each(given(name))[0], model(given(name))[0]
        # weights that are mapped from a file lie on any byte, and torch sums those in another order on some CPUs
        torch.testing.assert_close(found, want, rtol=0, atol=BY_DTYPE[torch.float32])
        assert not each.training


@pytest.mark.parametrize("name", AUTO)
def test_a_class_of_the_host_refuses_the_folder(name, tmp_path):
    """It would draw new attention; and does not, whatever sizes may differ."""
    converted(name).save_pretrained(tmp_path)
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(Exception, match=r"tokenmix|expected|must be|got str|not supported"):
            type(shared(name)).from_pretrained(tmp_path, **options)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(AttributeError, match="attention was replaced by tokenmix"):
        type(shared(name)).from_pretrained(tmp_path, config=config)


def fresh(code, *words):
    """What a new process prints, of which torchvision may have been built for another torch."""
    shim = Path(system_torchvision.__file__)  # which runs without the package
    begin = f"import runpy, sys; runpy.run_path({str(shim)!r})['ensure_torchvision']()\n"
    command = [sys.executable, "-W", "ignore", "-c", begin + code, *map(str, words)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


OPEN = """
import torch
def answer(load):
    for folder in sys.argv[1:]:
        print(repr(load(folder)(torch.arange(3, 12)[None])[0].flatten().tolist()))
"""
BY_AUTO = "answer(lambda folder: transformers.AutoModel.from_pretrained(folder, trust_remote_code=False))"
WITHOUT = """
import transformers
for load in (transformers.AutoModel, transformers.BertModel):
    for folder in sys.argv[1:]:
        try:
            load.from_pretrained(folder, ignore_mismatched_sizes=True)
            print("loaded")
        except Exception as why:
            print(" ".join(str(why).split()))
"""


@torch.no_grad()
def test_a_fresh_process_loads_what_another_saved(tmp_path):
    """After any import of tokenmix, before or after that of transformers; without one, transformers refuses."""
    model, folders = converted("bert"), [tmp_path / "one", tmp_path / "two"]
    model.save_pretrained(folders[0])
    save_replaced(model, folders[1])
    for code in (
        f"{OPEN}\nimport tokenmix, transformers\n{BY_AUTO}\nanswer(tokenmix.hosts.load_converted)",
        f"{OPEN}\nimport transformers; from transformers import AutoModel; import tokenmix\n{BY_AUTO}",
    ):
        for line in fresh(code, *folders).splitlines():
            assert (torch.tensor(json.loads(line)) - model(given("bert"))[0].flatten()).abs().max() <= 1e-6
    refused = fresh(WITHOUT, *folders).splitlines()
    assert all("model type `tokenmix.hosts.load_converted`" in line for line in refused[:2])
    assert all("tokenmix.hosts.load_converted(folder) opens it" in line for line in refused[2:])


def test_folders_of_version_0_2_open(tmp_path):
    model = converted("bert")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "tokenmix_converted"}))
    same(transformers.AutoModel.from_pretrained(tmp_path), model)
    same(load_converted(tmp_path), model)
    transformers.AutoModel.from_pretrained(tmp_path).save_pretrained(tmp_path / "new")
    same(load_converted(tmp_path / "new"), model)


@pytest.mark.parametrize("name", AUTO)
def test_the_config_of_a_converted_model_builds_a_converted_one(name, tmp_path):
    """By the Auto classes; a class of the host, which would build plain attention, refuses it."""
    model = converted(name)
    model.save_pretrained(tmp_path)
    for of in (model, load_converted(tmp_path), copy.deepcopy(model)):
        built = AUTO[name].from_config(of.config)
        assert {n: t.shape for n, t in built.state_dict().items()} == {
            n: t.shape for n, t in model.state_dict().items()
        }
        assert type(built) is type(model)
        with pytest.raises(MixerError, match=r"this config is of a model whose attention was replaced by [^\n]*$"):
            type(of)(of.config)
    same(AUTO[name].from_pretrained(tmp_path, config=model.config), model)
    if name != "vit":
        with pytest.raises(MixerError, match="AutoModelForImageClassification has no class for that"):
            transformers.AutoModelForImageClassification.from_config(model.config)


@torch.no_grad()
def test_other_heads_and_bare_models(tmp_path):
    """A base for a new head, a model with a head as a base, and part of a model; new weights are the head's alone."""
    converted("bert").save_pretrained(tmp_path / "base")
    head = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=5)
    assert head.num_labels == 5
    same(head.bert, load_converted(tmp_path / "base"))
    head.save_pretrained(tmp_path / "head")
    bare = transformers.AutoModel.from_pretrained(tmp_path / "head")
    same(bare, head.bert)
    other = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "head", num_labels=3, ignore_mismatched_sizes=True
    )
    same(other.bert, head.bert)
    with pytest.raises(MixerError, match="AutoModelForImageClassification has no class for that"):
        transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "base")
    head.bert.save_pretrained(tmp_path / "inner")
    same(transformers.AutoModel.from_pretrained(tmp_path / "inner"), head.bert)


@pytest.mark.parametrize("lost", ["1.attention.self.mixer", "1.intermediate"])
@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}])
def test_no_weight_of_a_layer_is_drawn(lost, options, tmp_path):
    model = converted("bert")
    state = {name: tensor for name, tensor in model.state_dict().items() if lost not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    for auto in (transformers.AutoModel, transformers.AutoModelForSequenceClassification):
        with pytest.raises(MixerError, match=r"lacks \d+ of \d+ weights of its Bert.*, such as ") as told:
            auto.from_pretrained(tmp_path, **options)
        assert "\n" not in str(told.value)


def test_a_damaged_description_is_refused(tmp_path):
    converted("bert").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"mixers": None}, {"host": {}}, {"mixers": {}}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(MixerError) as told:
            transformers.AutoModel.from_pretrained(tmp_path)
        assert "\n" not in str(told.value)


@torch.no_grad()
def test_copies_describe_themselves_and_restored_models_do_not(tmp_path):
    model = converted("llama")
    for i, each in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        each.save_pretrained(tmp_path / str(i))
        same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(i)), model)
    soft, _ = replace_mixers(shared("llama"), "attention")
    back, _ = restore(soft)
    back.save_pretrained(tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "llama"
    same(type(back).from_pretrained(tmp_path / "back"), shared("llama"))
    half, _ = restore(soft, "*.0.*")
    half.save_pretrained(tmp_path / "half")
    same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half"), half)
    with pytest.raises(RuntimeError, match="Missing key"):
        make("llama").load_state_dict(model.state_dict())
    assert model.config.to_dict()["model_type"] == "llama"
    assert type(shared("llama").config) is transformers.LlamaConfig


def test_a_config_that_two_models_share_describes_one():
    config = make("llama").config
    one, two = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    replace_mixers(one, "hydra", inplace=True)
    assert type(two.config) is transformers.LlamaConfig
    assert one.config is one.model.layers[0].mlp.config is not config


def test_a_model_inside_another_module(tmp_path):
    """As in sentence-transformers, which save the model they hold."""

    class Sentences(nn.Module):
        def __init__(self):
            super().__init__()
            self.auto_model = make("bert")

    new, _ = replace_mixers(Sentences(), "hydra", seed=0)
    new.auto_model.save_pretrained(tmp_path)
    same(transformers.AutoModel.from_pretrained(tmp_path), new.auto_model)


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_our_folders_open_by_auto_classes(name, tmp_path):
    new, report = replace_mixers(shared(name), "hydra", seed=0)
    save_replaced(new, tmp_path / "out", report)
    same(AUTO[name].from_pretrained(tmp_path / "out"), new)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    built = AUTO[name].from_config(config)
    assert built.state_dict().keys() == new.state_dict().keys()


def test_lora_merged_and_saved(tmp_path):
    import peft

    base = replace_mixers(shared("llama"), "hydra", seed=0)[0]
    lora = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    for name, p in lora.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    merged = lora.merge_and_unload()
    merged.save_pretrained(tmp_path)
    same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), merged)


def test_a_trainer_saves_resumes_and_keeps_the_best(tmp_path):
    texts = torch.randint(3, 50, (8, 6), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in texts]

    def trainer(model):
        options = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "max_steps": 4, "use_cpu": True}
        options |= {"load_best_model_at_end": True, "report_to": [], "disable_tqdm": True, "logging_steps": 2}
        args = transformers.TrainingArguments(str(tmp_path / "run"), per_device_train_batch_size=4, **options)
        return transformers.Trainer(model, args, train_dataset=data, eval_dataset=data)

    whole = trainer(converted("llama"))
    whole.train()
    whole.save_model(tmp_path / "saved")
    auto = transformers.AutoModelForCausalLM
    same(auto.from_pretrained(tmp_path / "saved"), whole.model)
    resumed = trainer(auto.from_pretrained(tmp_path / "run" / "checkpoint-2"))
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for name, tensor in resumed.model.state_dict().items():
        torch.testing.assert_close(tensor, whole.model.state_dict()[name])


@torch.no_grad()
def test_a_pipeline_opens_the_folder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = converted("gpt2")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save_pretrained(tmp_path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(tmp_path)
    pipe = transformers.pipeline("text-generation", model=str(tmp_path), device="cpu")
    same(pipe.model, model)
    said = pipe("w5 w6 w7", max_new_tokens=4, do_sample=False, return_tensors=True)[0]["generated_token_ids"]
    assert said == model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)[0].tolist()


@pytest.mark.parametrize("name", AUTO)
def test_the_models_own_config_opens_no_folder_for_a_class_of_the_host(name, tmp_path):
    """The class would draw new attention, and the config says that this model has mixers."""
    model = converted(name)
    model.save_pretrained(tmp_path)
    for config in (model.config, copy.deepcopy(model.config), pickle.loads(pickle.dumps(model.config))):
        with pytest.raises(MixerError, match=r"^from_pretrained: config= is that of a model whose attention [^\n]*$"):
            type(shared(name)).from_pretrained(tmp_path, config=config)
    same(AUTO[name].from_pretrained(tmp_path), model)
