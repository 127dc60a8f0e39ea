"""Every causal mixer inside the language model, the training loop and the evaluation, as a user would run it."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cases import CASES, GRIDS
from perturb import perturb_mixers
from tokenmix import MIXERS, aux_losses
from tokenmix.lab.data import Sampler, open_corpus
from tokenmix.lab.train import DataConfig, OptimConfig, RunConfig, TrainConfig, evaluate, resume, train
from tokenmix.lab.train.optim import build_optimizers, learning_rate, set_rates
from tokenmix.models import LM, LMConfig
from tokenmix.system.checkpoint import load_checkpoint
from tokenmix.testing.tolerances import BY_DTYPE

MAX_LEN, LENGTH, PAST = 40, 30, 13
CUTS = (1, 8, 10, 23)
CAUSAL = [name for name, cls in MIXERS.items() if cls.facts.causal]


def spec(case: str) -> dict:
    """A case of the contract suite as a layer of a model of MAX_LEN."""
    name, options = CASES[case]
    return {
        "name": name,
        **{k: MAX_LEN if k in ("max_len", "max_context_len") and v else v for k, v in options.items()},
    }


def first(name: str) -> dict:
    """The first case of a mixer that can be causal."""
    return spec(next(case for case, (row, _) in CASES.items() if row == name and case not in GRIDS))


def config(*mixers: dict, **options) -> LMConfig:
    """Two layers of 16 features, with a large init_std."""
    return LMConfig(
        **{
            "dim": 16,
            "max_len": MAX_LEN,
            "vocab": 50,
            "mixers": mixers,
            "layers": max(2, len(mixers)),
            "init_std": 0.3,
            **options,
        }
    )


def drawn(*mixers: dict, **options) -> LM:
    torch.manual_seed(0)
    return LM(config(*mixers, **options)).eval()


def make(*mixers: dict, **options) -> LM:
    """A model with mixers of which everything shows in the logits."""
    return perturb_mixers(drawn(*mixers, **options))


def tokens(rows: int = 3, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(1))


def stream(model: LM, x: torch.Tensor) -> torch.Tensor:
    state, out = model.init_state(len(x)), []
    for a, b in zip((0, *CUTS), (*CUTS, x.shape[1]), strict=True):
        logits, state = model.extend(x[:, a:b], state)
        out.append(logits)
    return torch.cat(out, 1)


@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_streaming_is_forward_and_the_future_stays_out(name):
    model = make(first(name))
    for dtype, same in ((torch.float32, BY_DTYPE[torch.float32]), (torch.float64, 1e-13)):
        model, x = model.to(dtype), tokens()
        full, changed = model(x), x.clone()
        changed[:, PAST:] = (changed[:, PAST:] + 1) % 50
        moved, size = (model(changed) - full).abs(), full.abs().max()
        assert moved[:, :PAST].max() <= 1e-6 * size
        assert moved[:, PAST:].max() > 0.1 * size
        assert (stream(model, x) - full).abs().max() <= same * size


@pytest.mark.parametrize("name", CAUSAL)
def test_prompts_of_different_lengths_go_on_as_each_does_alone(name):
    model, x, padding = make(first(name)).double(), tokens(3, 12), (0, 4, 11)
    mask = torch.stack([torch.arange(12) >= p for p in padding])
    together = model.generate(x, 20, temperature=0, key_mask=mask)
    for row, p in enumerate(padding):
        assert torch.equal(together[row, p:], model.generate(x[row : row + 1, p:], 20, temperature=0)[0])


@pytest.mark.parametrize("name", CAUSAL)
def test_gradient_reaches_every_parameter(name):
    model, x = make(first(name)).train(), tokens(2, 24)
    with torch.no_grad():
        for p in model.parameters():  # some start where their gradient is 0: the filters of aft_conv
            p.add_(0.1 * torch.randn_like(p))
    F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    assert [
        n for n, p in model.named_parameters() if p.grad is None or not p.grad.any() or not p.grad.isfinite().all()
    ] == []


@pytest.mark.parametrize("name", CAUSAL)
def test_a_meta_build_reset_under_a_seed_is_a_direct_build(name):
    direct = drawn(first(name))
    with torch.device("meta"):
        built = LM(direct.config)
    built = built.to_empty(device="cpu")
    torch.manual_seed(0)
    built.reset_parameters()
    for (key, a), (_, b) in zip(direct.state_dict().items(), built.state_dict().items(), strict=True):
        assert torch.equal(a, b), key


def test_what_starts_as_a_copy_is_one_in_a_model_too():
    """Check that Longformer's global projections start as copies of q_proj, k_proj and v_proj.

    The model draws those anew, so they are not copies of an earlier draw.
    """
    model = make(first("longformer"), first("attention"), layers=4)
    model.reset_parameters()
    for block in (model.blocks[0], model.blocks[2]):
        for name in "qkv":
            own, other = (block.mixer.get_submodule(f"{name}_{kind}") for kind in ("global", "proj"))
            assert torch.equal(own.weight, other.weight)
            assert torch.equal(own.bias, other.bias)
            assert own.weight.data_ptr() != other.weight.data_ptr()


@pytest.mark.parametrize("name", CAUSAL)
def test_every_projection_starts_at_the_model_s_scale(name):
    model = drawn(first(name), init_std=0.02)
    mixer = model.blocks[1].mixer
    for child in ("q_proj", "k_proj", "v_proj", "out_proj"):
        layer = getattr(mixer, child, None)
        if isinstance(layer, nn.Linear):
            assert layer.weight.std().item() == pytest.approx(0.02 / (2 if child == "out_proj" else 1), rel=0.25)
            assert layer.bias is None or not layer.bias.any()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"the cat sat on the mat, and the dog lay by the door. " * 60)
    return str(path)


def run_config(text: str, *mixers: dict, steps: int = 3, aux_weight: float = 0.01, **loop) -> RunConfig:
    """Three steps, a checkpoint after each, an evaluation and a sample at the end."""
    model = config(*mixers, vocab=256, init_std=0.1)
    options = {
        "batch_size": 2,
        "log_every": 1,
        "eval_every": 2,
        "eval_bytes": 120,
        "save_every": 1,
        "keep": 5,
        "sample_bytes": 4,
        "device": "cpu",
    }
    optim = OptimConfig(lr=1e-2, warmup=1, schedule="constant", aux_weight=aux_weight)
    return RunConfig(model, DataConfig(source=text, seq_len=24), optim, TrainConfig(steps=steps, **{**options, **loop}))


CHANGING = {  # mixer whose buffers change in training -> those that do
    "performer": (
        {"name": "performer", "heads": 2, "num_features": 5, "redraw_interval": 2},
        ("projection", "forwards"),
    ),
    "routing": ({"name": "routing", "heads": 2, "clusters": 3, "window": 4, "decay": 0.9}, ("centroids",)),
    "lambda": ({"name": "lambda", "heads": 2, "key_width": 3}, ("norms.q.running_mean", "norms.k.running_var")),
    "sinkhorn": (
        {"name": "sinkhorn", "heads": 2, "block": 4, "gumbel": True},
        (),
    ),  # no buffer: its noise comes from torch's generator
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", CHANGING)
def test_resuming_is_going_on_to_the_bit_with_everything_that_changes_in_training(name, accumulate, text, tmp_path):
    mixer, buffers = CHANGING[name]
    run = run_config(text, mixer, accumulate=accumulate)
    train(run, tmp_path / "whole", verbose=False)
    train(run.override({"train.steps": 1}), tmp_path / "stopped", verbose=False)
    torch.randn(7)  # whatever happens in between
    resume(tmp_path / "stopped", changes={"train.steps": 3}, verbose=False)
    whole, stopped = (
        load_checkpoint(tmp_path / out / "checkpoints", 3, "model", "optimizer", "rng")[0]
        for out in ("whole", "stopped")
    )
    for group, tensors in whole.items():
        assert set(tensors) == set(stopped[group])
        assert [key for key, value in tensors.items() if not torch.equal(value, stopped[group][key])] == [], group
    early = load_checkpoint(tmp_path / "whole" / "checkpoints", 1, "model")[0]["model"]
    for buffer in buffers:
        assert not torch.equal(early[f"blocks.1.mixer.{buffer}"], whole["model"][f"blocks.1.mixer.{buffer}"])


@pytest.mark.parametrize("name", CAUSAL)
def test_a_step_in_bf16_and_its_evaluation_are_finite(name, text, tmp_path):
    summary = train(run_config(text, first(name), steps=1, precision="bf16"), tmp_path / "run", verbose=False)
    assert 7 < summary["valid_bits_per_byte"] < 9


@pytest.mark.parametrize("name", CAUSAL)
def test_evaluation_is_the_mean_over_bytes_and_moves_nothing(name):
    """One window over all bytes: the first is charged 8 bits, the rest as forward scores them."""
    model, data = (
        make(first(name), vocab=256).train(),
        torch.randint(256, (LENGTH,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2)),
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = evaluate(model, data, seq_len=MAX_LEN)
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    with torch.no_grad():
        logits = model.eval()(data[None, :-1].long())
    bits = F.cross_entropy(logits[0], data[1:].long(), reduction="sum") / torch.log(torch.tensor(2.0))
    assert result.bits_per_byte == pytest.approx((8 + bits.item()) / LENGTH, rel=1e-5)


ROUTING = {"name": "routing", "heads": 2, "clusters": 3, "window": 4, "decay": 0.9}
COMPRESSIVE = {"name": "compressive", "heads": 2, "memory": 2, "compressed": 2, "rate": 2, "pool": "conv"}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_auxiliary_losses_are_logged_and_move_what_they_train(accumulate, text, tmp_path):
    for out, weight in (("with", 10.0), ("without", 0.0)):
        train(
            run_config(text, ROUTING, COMPRESSIVE, accumulate=accumulate, aux_weight=weight),
            tmp_path / out,
            verbose=False,
        )
    lines = [json.loads(line) for line in (tmp_path / "with/metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["kind"] == "eval" or set(line["aux"]) == {"routing", "compressive"}
        assert line["kind"] == "eval" or all(0 < value < 100 for value in line["aux"].values())
    a, b = (load_checkpoint(tmp_path / out / "checkpoints", 3, "model")[0]["model"] for out in ("with", "without"))
    assert not torch.equal(a["blocks.0.mixer.q_proj.weight"], b["blocks.0.mixer.q_proj.weight"])
    assert not torch.equal(a["blocks.1.mixer.squeeze"], b["blocks.1.mixer.squeeze"])
    torch.manual_seed(0)  # as the run's own
    start = LM(run_config(text, ROUTING, COMPRESSIVE).model).state_dict()
    assert all(not torch.equal(start[key], a[key]) for key in ("blocks.0.mixer.centroids", "blocks.1.mixer.squeeze"))


def test_the_auxiliary_loss_of_a_batch_is_logged_whole(text, tmp_path):
    """Check that the auxiliary loss logged for a batch in parts is the mean over the parts.

    Decay 1 keeps the centroids where they are, so that the parts see the same ones.
    """
    still = {**ROUTING, "decay": 1.0}
    for out, accumulate in (("one", 1), ("two", 2)):
        train(run_config(text, still, steps=1, accumulate=accumulate), tmp_path / out, verbose=False)
    one, two = (
        json.loads((tmp_path / out / "metrics.jsonl").read_text().splitlines()[0])["aux"] for out in ("one", "two")
    )
    assert one == pytest.approx(two, rel=1e-5)


def test_with_weight_0_the_loss_is_the_plain_one(text, tmp_path):
    run = run_config(text, ROUTING, COMPRESSIVE, aux_weight=0.0)
    train(run, tmp_path / "run", verbose=False)
    torch.manual_seed(0)
    model, corpus = LM(run.model), open_corpus(text)
    (optimizer,) = build_optimizers(model, run.optim)
    sampler = Sampler(corpus.split("train"), seq_len=24, batch_size=2, seed=0)
    for step in range(3):
        x, y = sampler.batch(step)
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip)
        set_rates([optimizer], learning_rate(step, run.optim, 3))
        optimizer.step()
        optimizer.zero_grad()
    saved = load_checkpoint(tmp_path / "run" / "checkpoints", 3, "model")[0]["model"]
    assert [key for key, value in model.state_dict().items() if not torch.equal(value, saved[key])] == []


def test_an_auxiliary_loss_that_overflows_does_no_harm_with_weight_0(text, tmp_path, monkeypatch):
    monkeypatch.setattr(MIXERS["routing"], "_commitment", lambda self, q, *rest: q.sum() * float("inf"))
    summary = train(run_config(text, ROUTING, aux_weight=0.0), tmp_path / "run", verbose=False)
    assert summary["valid_bits_per_byte"] < 10


def test_each_layer_s_loss_has_its_name_and_inner_collections_are_their_own():
    model, x = make(ROUTING, COMPRESSIVE, layers=4).train(), tokens()
    with aux_losses() as outer:
        model(x)
        with aux_losses() as inner:
            model(x)
    assert list(outer) == list(inner) == ["routing", "compressive", "routing.1", "compressive.1"]
    with aux_losses() as none:
        make(first("attention"))(x)
    assert none == {}
