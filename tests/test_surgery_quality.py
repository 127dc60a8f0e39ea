"""What replacing gained and lost: scores on held-out data, the comparison, text through folders."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from surgery_models import GPT2, SEQ2SEQ, make, padded, shared, tf
from tokenmix import MixerError
from tokenmix.hosts.surgery import load_converted, replace_mixers, save_replaced
from tokenmix.hosts.surgery.quality import AGREEMENT, COSINE, PERPLEXITY, Quality, _mean_rows, measure_quality
from tokenmix.lab.advise.compare import Comparison, Speed, compare
from tokenmix.lab.advise.decoding import Decoded
from tokenmix.lab.cli import main
from tokenmix.lab.train import distill


def quality(measure: str, *rows: float) -> Quality:
    return Quality(measure, torch.tensor(rows, dtype=torch.float64), torch.ones(len(rows), dtype=torch.float64))


@torch.no_grad()
def test_perplexity_is_that_of_the_real_tokens():
    model = shared("gpt2")
    ids, mask = padded("right")
    found = measure_quality({"gpt2": model}, [{"input_ids": ids, "attention_mask": mask}])["gpt2"]
    log_probs = F.log_softmax(model(ids, attention_mask=mask).logits.double(), -1)
    losses = [-float(log_probs[b, t - 1, ids[b, t]]) for b in range(3) for t in range(1, 9) if mask[b, t]]
    assert found.measure == PERPLEXITY
    assert found.value == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert int(found.counts.sum()) == len(losses)


@torch.no_grad()
def test_agreement_and_cosine_with_the_teacher():
    vit = shared("vit")
    images = torch.randn(6, 3, 32, 32)
    other = copy.deepcopy(vit)
    other.classifier.weight.zero_()
    other.classifier.bias.copy_(torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]))
    found = measure_quality({"teacher": vit, "other": other}, [images[:4], images[4:]])
    wanted = float((vit(images).logits.argmax(-1) == 2).double().mean())
    assert (found["teacher"].measure, found["teacher"].value) == (AGREEMENT, 1)
    assert found["other"].value == pytest.approx(wanted)
    bert = shared("bert")
    ids, mask = padded("left")
    scores = measure_quality({"a": bert, "b": bert}, [{"input_ids": ids, "attention_mask": mask}])
    assert (scores["b"].measure, scores["b"].value) == (COSINE, pytest.approx(1))
    with pytest.raises(MixerError, match="over none, every model would look the same"):
        measure_quality({"a": bert}, [])


def test_a_difference_within_the_noise_is_none():
    before = quality(PERPLEXITY, 3.0, 3.2, 2.9, 3.1)
    assert quality(PERPLEXITY, 3.5, 3.8, 3.4, 3.7).change(before) == "worse"
    assert quality(PERPLEXITY, 2.5, 2.8, 2.4, 2.7).change(before) == "better"
    assert quality(PERPLEXITY, 3.5, 2.8, 3.1, 2.9).change(before) == "same"
    assert before.change(before) == "same"
    assert quality(PERPLEXITY, *(n + 1e-7 for n in (3.0, 3.2, 2.9, 3.1))).change(before) == "same", "rounding"
    assert quality(COSINE, 0.9, 0.8).change(quality(COSINE, 1.0, 1.0)) == "worse"


def speed(ms: float, high: float, peak: int, state: int | None = None) -> Speed:
    return Speed(ms / 1e3, high / 1e3, (peak << 20, peak << 20), None if state is None else Decoded(1.0, state))


def test_the_sentence_says_what_is_worse_and_does_not_call_noise_a_saving():
    scores = {"teacher": quality(PERPLEXITY, 3.0, 3.2), "distilled": quality(PERPLEXITY, 3.5, 3.8)}
    speeds = {
        64: {"teacher": speed(1.0, 1.2, 40, 1 << 20), "distilled": speed(0.9, 1.1, 40, 1 << 10)},
        4096: {"teacher": speed(90.0, 95.0, 80, 1 << 22), "distilled": speed(30.0, 33.0, 60, 1 << 10)},
    }
    found = Comparison(("teacher", "distilled"), scores, speeds)
    assert found.sentence() == (
        "distilled, worse than before: perplexity 38.47 instead of 22.20; "
        "better: state 1.00 KiB instead of 1.00 MiB at 64 tokens, 3.00x as fast at 4,096 tokens, "
        "peak memory 60.0 MiB instead of 80.0 MiB at 4,096 tokens, state 1.00 KiB instead of 4.00 MiB at 4,096 tokens; "
        "no difference beyond noise: speed at 64 tokens, peak memory at 64 tokens."
    )
    assert found.table().columns == ["model", "perplexity", "tokens", "ms a pass", "peak", "state", "ms a token"]
    assert found.table().rows[2][:4] == ["teacher", "22.20", "4,096", "90.00 to 95.00"]
    nothing = Comparison(("a", "b"), {"a": scores["teacher"], "b": scores["teacher"]}, {})
    assert nothing.sentence().startswith("b, nothing is worse than before beyond noise; no difference")


def test_three_models_are_compared():
    teacher = make("gpt2", std=0.3)
    models = {"teacher": teacher, "same": replace_mixers(teacher, "attention")[0].eval()}
    models["other"] = replace_mixers(teacher, "linear", init="random", seed=0)[0].eval()
    batches = [{"input_ids": torch.randint(60, (4, 20))} for _ in range(2)]
    found = compare(models, batches, [16, 40], seconds=0.2)
    assert found.quality["same"].value == pytest.approx(found.quality["teacher"].value, rel=1e-4)
    states = {name: s.decoded.state_bytes for name, s in found.speeds[40].items()}
    assert states["other"] < states["teacher"]
    assert len(found.table().rows) == 6
    assert json.loads(json.dumps(found.to_json()))["speeds"][0]["length"] == 16
    for wrong, said in (
        (({"a": teacher}, batches, [8]), "two models or more"),
        ((models, [], [8]), "batches is empty"),
        ((models, batches, [999]), "length 999: the model takes 48 tokens at most"),
        (({"a": teacher, "b": make("gpt2").train()}, batches), "b is in training mode"),
    ):
        with pytest.raises(MixerError, match=said):
            compare(*wrong)


def test_outputs_that_are_no_numbers_agree_with_nothing():
    teacher = shared("vit")
    broken = copy.deepcopy(teacher)
    broken.classifier.bias.data.fill_(math.nan)
    images = torch.randn(6, 3, 32, 32)
    found = measure_quality({"teacher": teacher, "broken": broken}, [images])
    assert math.isnan(found["broken"].value)
    assert found["broken"].change(found["teacher"]) == "worse"
    with pytest.raises(MixerError, match="top-1 agreement of the model 'broken' is nan: .* check the weights"):
        measure_quality({"broken": broken, "teacher": teacher}, [images])


def test_padding_is_not_scored_even_where_it_is_no_number():
    values, mask = torch.tensor([[1.0, math.nan]], dtype=torch.float64), torch.tensor([[True, False]])
    assert _mean_rows(COSINE, values, mask).value == 1
    ids = torch.randint(60, (2, 8))
    with pytest.raises(MixerError, match="padding only"):
        measure_quality({"gpt2": shared("gpt2")}, [{"input_ids": ids, "attention_mask": torch.zeros_like(ids)}])


def test_perplexity_is_only_of_models_that_predict_the_next_token(tmp_path):
    """Not of a decoder that labels tokens, nor of the decoder half of a translator."""
    ids = torch.randint(60, (4, 8))
    tagger = tf.GPT2ForTokenClassification(tf.GPT2Config(**GPT2, num_labels=3)).eval()
    translator = tf.BartForConditionalGeneration(tf.BartConfig(**SEQ2SEQ, max_position_embeddings=40)).eval()
    for i, (teacher, where) in enumerate(((tagger, "*"), (translator, "model.decoder.layers.*.self_attn"))):
        student = replace_mixers(teacher, {where: "linear"})[0]
        batches = [{"input_ids": ids}]
        found = distill(teacher, student, batches, valid=batches, out=tmp_path / str(i), layer_steps=1, steps=1)
        assert (found["quality"]["measure"], found["quality"]["teacher"]) == (AGREEMENT, 1)
        assert compare({"a": teacher, "b": student.eval()}, batches).quality["a"].measure == AGREEMENT


def test_comparing_leaves_the_models_as_they_are():
    """Also at another image size, to which the weights of positions are interpolated."""
    teacher = make("timm")
    student = replace_mixers(teacher, "hydra", seed=0)[0].eval()
    before = {name: p.clone() for name, p in teacher.state_dict().items()}
    compare({"before": teacher, "after": student}, None, [64], seconds=0.05)
    assert all(torch.equal(p, before[name]) for name, p in teacher.state_dict().items())
    student(torch.randn(1, 3, 32, 32))


def test_comparing_refuses_sizes_and_models_that_say_nothing():
    teacher = make("gpt2")
    partly = copy.deepcopy(teacher)
    partly.transformer.h[1].train()
    models = {"a": teacher, "b": partly.eval()}
    for lengths, batch in (([0], 1), ([-1], 1), ([8], 0)):
        with pytest.raises(MixerError, match="compare: batch and lengths must be >= 1"):
            compare(models, None, lengths, batch=batch)
    partly.transformer.h[1].train()
    with pytest.raises(MixerError, match="compare: b is in training mode"):
        compare(models, [{"input_ids": torch.randint(60, (2, 8))}])


def test_distillation_says_what_is_worse(tmp_path):
    teacher = make("gpt2", std=0.3)
    student = replace_mixers(teacher, "linear", init="random", seed=0)[0]
    data = [{"input_ids": torch.randint(60, (4, 20))} for _ in range(4)]
    found = distill(teacher, student, data, out=tmp_path / "run", layer_steps=4, steps=2, valid=data[:2])["quality"]
    teacher_score = measure_quality({"t": teacher}, data[:2])["t"].value
    assert (found["measure"], found["teacher"]) == ("perplexity", pytest.approx(teacher_score))
    assert found["after"] == pytest.approx(measure_quality({"s": student.eval()}, data[:2])["s"].value)
    assert found["text"].startswith(f"perplexity on held-out data: teacher {teacher_score:,.2f}, replaced ")


def words(folder: Any) -> Any:
    """A tokenizer whose tokens are words, saved in a folder."""
    import tokenizers
    import transformers

    names = ["[PAD]", "[UNK]", "the", "cat", "sat", "on", "mat"]
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(names)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]")
    if folder is not None:
        tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture
def gpt2_folder(tmp_path):
    make("gpt2").save_pretrained(tmp_path / "gpt2")
    words(tmp_path / "gpt2")
    spec = '{"transformer.h.*": {"name": "linear"}}'
    assert main(["convert", str(tmp_path / "gpt2"), spec, "--out", str(tmp_path / "converted")]) == 0
    return tmp_path / "converted"


def test_eval_and_sample_of_a_folder(gpt2_folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat " * 20)
    capsys.readouterr()
    assert main(["eval", str(gpt2_folder), "--data", str(text), "--seq-len", "30", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    ids = words(None)(text.read_text(), return_tensors="pt")["input_ids"].view(-1, 30)
    wanted = measure_quality({"m": load_converted(gpt2_folder)}, [{"input_ids": ids}])["m"].value
    assert (got["tokens"], got["window"], got["perplexity"]) == (4 * 29, 30, pytest.approx(wanted, rel=1e-5))
    said = []
    for _ in range(2):
        argv = ["sample", str(gpt2_folder), "--prompt", "the cat", "--tokens", "5", "--seed", "1", "--json"]
        assert main(argv) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0] == said[1]
    assert said[0]["prompt"] == "the cat"


def test_convert_says_what_was_gained_and_lost(gpt2_folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat " * 40)
    argv = ["convert", str(tmp_path / "gpt2"), '{"*": {"name": "attention"}}', "--out", str(tmp_path / "same")]
    capsys.readouterr()
    assert main([*argv, "--data", str(text), "--lengths", "16", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)["compared"]
    assert got["quality"]["after"] == pytest.approx(got["quality"]["before"], rel=1e-4)
    assert {s["model"] for s in got["speeds"]} == {"before", "after"}
    assert "perplexity" in got["text"].partition("no difference beyond noise")[2], "the same numbers but for rounding"
    argv[-1] = str(tmp_path / "late")
    assert main([*argv, "--lengths", "999"]) == 2
    assert "late is written, but the models were not compared: compare: length 999" in capsys.readouterr().err
    assert (tmp_path / "late" / "config.json").is_file()
    argv[-1] = str(tmp_path / "none")
    assert main([*argv, "--data", str(tmp_path / "missing")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_tokenizer_of_bytes_needs_no_vocabulary(tmp_path, capsys):
    tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2 | {"vocab_size": 384})).save_pretrained(tmp_path / "bytes")
    tf.ByT5Tokenizer().save_pretrained(tmp_path / "bytes")
    assert not (tmp_path / "bytes/tokenizer.json").exists()
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat " * 20)
    assert main(["eval", str(tmp_path / "bytes"), "--data", str(text)]) == 0
    assert "perplexity" in capsys.readouterr().out
    (tmp_path / "bytes/tokenizer_config.json").write_text('{"tokenizer_class": "FSMTTokenizer"}')
    assert main(["eval", str(tmp_path / "bytes"), "--data", str(text)]) == 2
    assert "holds no tokenizer (tokenizer.json" in capsys.readouterr().err


def test_what_a_folder_cannot_do_is_one_line(gpt2_folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat")
    make("bert").save_pretrained(tmp_path / "bert")
    make("gpt2").save_pretrained(tmp_path / "mute")
    long = tmp_path / "long.txt"
    long.write_text("the cat sat on the mat " * 20)
    broken = make("gpt2")
    broken.transformer.ln_f.bias.data.fill_(math.nan)
    small = tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2 | {"vocab_size": 5}))
    for name, model in (("nan", broken), ("small", small), ("llama", make("llama"))):
        model.save_pretrained(tmp_path / name)
        words(tmp_path / name)
    for argv, said in {
        ("eval", str(gpt2_folder)): "holds a model without data of its own; give --data TEXT",
        ("eval", str(gpt2_folder), "--data", str(text)): "has 2 tokens; a window of 48 needs as many",
        ("eval", str(gpt2_folder), "--data", str(tmp_path / "none")): "cannot be read (No such file or directory)",
        ("eval", str(gpt2_folder), "--data", str(text), "--stride", "3"): "--stride is for runs; a host's folder takes",
        ("eval", str(gpt2_folder), "--data", str(text), "--seq-len", "99"): "windows hold 2 to 48 tokens, got 99",
        ("eval", str(tmp_path / "bert"), "--data", str(text)): "holds a BertModel, which predicts no next token",
        ("eval", str(tmp_path / "mute"), "--data", str(text)): "holds no tokenizer (tokenizer.json",
        ("sample", str(tmp_path / "bert")): "holds a BertModel, which predicts no next token",
        ("sample", str(gpt2_folder), "--prompt", "cat", "--tokens", "48"): "takes 48 tokens, of which the prompt has 1",
        ("sample", str(gpt2_folder), "--bytes", "4"): "--bytes is for runs",
        ("eval", str(tmp_path), "--data", str(text)): "is not a run directory",
        ("eval", str(gpt2_folder), "--data", str(text), "--max-bytes", "-5"): "--max-bytes must be >= 1, got -5",
        ("eval", str(tmp_path / "small"), "--data", str(long)): "its tokenizer gives token 6, and its model knows 5",
        ("sample", str(tmp_path / "small"), "--prompt", "mat"): "its tokenizer gives token 6, and its model knows 5",
        ("sample", str(gpt2_folder), "--prompt", "cat " * 60): "takes 48 tokens, of which the prompt has 60.",
        ("sample", str(tmp_path / "llama"), "--tokens", "0"): "--tokens must be >= 1, got 0",
        ("sample", str(gpt2_folder), "--top-k", "-1"): "top_k must be at least 1, got -1",
        ("sample", str(gpt2_folder), "--top-p", "2"): "top_p must be in (0, 1], got 2",
        ("sample", str(gpt2_folder), "--temperature", "nan"): "temperature must be finite and >= 0 (0 is greedy), got",
        ("sample", str(tmp_path / "nan")): "are NaN or infinite; look for weights or inputs that are not finite",
        ("eval", str(tmp_path / "nan"), "--data", str(long)): "perplexity of the model 'model' is nan",
    }.items():
        capsys.readouterr()
        assert main(list(argv)) == 2, argv
        assert said in capsys.readouterr().err, argv


def test_the_tokenizer_goes_along_on_every_way(gpt2_folder, tmp_path):
    """Through convert, from the folder a model was loaded from, and as an object."""
    again = load_converted(gpt2_folder)
    report = replace_mixers(make("gpt2"), "linear")[1]
    save_replaced(again, tmp_path / "again", report)
    plain = replace_mixers(make("gpt2"), "linear")[0]
    save_replaced(plain, tmp_path / "object", report, tokenizer=words(None))
    for folder in (gpt2_folder, tmp_path / "again", tmp_path / "object"):
        assert (folder / "tokenizer.json").is_file(), folder
        assert json.loads((folder / "config.json").read_text())["kind"] == "surgery"
