"""``cpu_kernels``: hybrids of transformers compute the same on the C kernels, keep documents apart and are restored."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hybrid_models import BAMBA, MODELS, build
from tokenmix import MixerError
from tokenmix.hosts import cpu_kernels
from tokenmix.hosts.recurrent_functions import run_state_update

pytest.importorskip("transformers", reason="transformers comes with the extra hf")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
NEAR_TIE = 1e-4
LENGTHS = (5, 1, 9, 6)


def tokens(rows: int = 2, length: int = 21, seed: int = 2) -> Tensor:
    return torch.randint(2, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, ids: Tensor, **given: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids, **{"use_cache": False, **given}).logits
    return found


def gradients(model: Any, *calls: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of the sum of weighted logits of calls, whose tokens follow each other."""
    model.zero_grad()
    lengths = [call["input_ids"].shape[1] for call in calls]
    weights = torch.randn(len(calls[0]["input_ids"]), sum(lengths), 61, generator=torch.Generator().manual_seed(5))
    for call, weight in zip(calls, weights.split(lengths, 1), strict=True):
        (model(**call, use_cache=False).logits * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, g in want.items():
        assert float((got[name] - g).abs().max()) <= 2e-4 * float(g.abs().max()) + 1e-7, name


def assert_same_text(model: Any, got: Tensor, want: Tensor) -> None:
    """Compare texts token for token, up to the first where the two largest logits are nearly equal."""
    assert got.shape == want.shape
    for row, other in zip(got, want, strict=True):
        apart = (row != other).nonzero()
        if len(apart):
            top = logits(model, other[None, : int(apart[0])])[0, -1].topk(2).values
            assert float(top[0] - top[1]) < NEAR_TIE


def packed() -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return documents, and what tells that they are packed into one row."""
    documents = [tokens(1, n, seed=n) for n in LENGTHS]
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
    told = {
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "seq_idx": index.int(),
    }
    return documents, told


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(name):
    model, ids = MODELS[name](), tokens()
    want, grads = logits(model, ids), gradients(model.train(), {"input_ids": ids})
    with cpu_kernels(model.eval()) as found:
        assert len(found.replaced) >= 2
        assert not found.kept
        torch.testing.assert_close(logits(model, ids), want, **CLOSE)
        assert_same_gradients(gradients(model.train(), {"input_ids": ids}), grads)
    assert torch.equal(logits(model.eval(), ids), want)
    assert not any("forward" in m.__dict__ or m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_generated_texts_are_those_of_transformers(name):
    model, ids, mask = MODELS[name](), tokens(), torch.ones(2, 21, dtype=torch.long)
    mask[0, :4] = 0
    ways: list[dict[str, Any]] = [{"max_new_tokens": 12}, {"max_new_tokens": 8, "num_beams": 3}]
    ways = [{"attention_mask": mask, "do_sample": False, **way} for way in ways]
    want = [model.generate(ids, **way) for way in ways]
    cpu_kernels(model)
    for way, text in zip(ways, want, strict=True):
        assert_same_text(model, model.generate(ids, **way), text)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_in_any_cuts_equals_the_whole(name):
    model, ids = MODELS[name](), tokens()
    want, given, parts = logits(model, ids), {}, []
    with cpu_kernels(model), torch.no_grad():
        for part, at in zip(*(a.split([7, 1, 1, 2, 10], -1) for a in (ids, torch.arange(21)[None])), strict=True):
            out = model(part, use_cache=True, position_ids=at, **given)  # Bamba counts from 0 at each call without
            parts.append(out.logits)
            given = {"cache": out.cache}
    torch.testing.assert_close(torch.cat(parts, 1), want, **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_equal_the_documents_apart(name):
    model, (documents, how) = MODELS[name](), packed()
    row = torch.cat(documents, 1)
    cpu_kernels(model)
    want = torch.cat([logits(model, part) for part in documents], 1)
    torch.testing.assert_close(logits(model, row, **how), want, **CLOSE)
    torch.testing.assert_close(model(row, **how).logits, want, **CLOSE)  # use_cache=None, which stands for True
    model.train()
    draw = [{"input_ids": row, **how}], [{"input_ids": part} for part in documents]
    one, apart = (gradients(model, *calls) for calls in draw)
    assert_same_gradients(one, apart)


@pytest.mark.parametrize("told", ["position_ids", "cu_seq_lens_q", "seq_idx"])
@pytest.mark.parametrize("name", MODELS)
def test_each_way_to_tell_of_documents_is_enough(name, told):
    model, (documents, how) = MODELS[name](), packed()
    cpu_kernels(model)
    want = torch.cat([logits(model, part) for part in documents], 1)
    torch.testing.assert_close(logits(model, torch.cat(documents, 1), **{told: how[told]}), want, **CLOSE)


@pytest.mark.parametrize("name", MODELS)
def test_documents_in_rows_with_padding_equal_the_documents_apart(name):
    """Rows are padded on either side; the documents of rows differ."""
    model, (documents, _) = MODELS[name](), packed()
    a, b, c, d = documents
    rows = torch.cat([torch.cat([a, c], 1), torch.cat([d, b, tokens(1, 7)], 1)])
    at = torch.cat([torch.arange(n) for n in (5, 9)]), torch.cat([torch.arange(n) for n in (6, 1)])
    mask = torch.arange(14) < torch.tensor([[14], [7]])
    positions = torch.stack([at[0], torch.cat([at[1], torch.zeros(7, dtype=torch.long)])])
    cpu_kernels(model)
    got = logits(model, rows, attention_mask=mask.long(), position_ids=positions)
    for (row, start), part in zip(((0, 0), (1, 6), (0, 5), (1, 0)), documents, strict=True):
        piece = got[row : row + 1, start : start + part.shape[1]]
        torch.testing.assert_close(piece, logits(model, part), **CLOSE)


def test_eager_attention_keeps_documents_apart_too():
    """In Granite, whose softmax layers transformers does not tell of documents at all."""
    model, (documents, how) = MODELS["granitemoehybrid"](), packed()
    model.set_attn_implementation("eager")
    cpu_kernels(model)
    want = torch.cat([logits(model, part) for part in documents], 1)
    got = logits(model, torch.cat(documents, 1), position_ids=how["position_ids"])
    torch.testing.assert_close(got, want, **CLOSE)


def test_transformers_mixes_packed_documents_without_a_word():
    """Where it is told by ``position_ids`` alone, as its collator does by default, and where a cache is made."""
    model, (documents, how) = MODELS["qwen3_5"](), packed()
    row = torch.cat(documents, 1)
    want = torch.cat([logits(model, part) for part in documents], 1)
    assert float((logits(model, row, position_ids=how["position_ids"]) - want).abs().max()) > 0.1
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        logits(model, row, **how)
    kimi = MODELS["kimi_linear"]()
    apart = torch.cat([logits(kimi, part) for part in documents], 1)
    del how["seq_idx"]
    assert float((logits(kimi, row, **how) - apart).abs().max()) > 0.1  # refused there in its other hybrids


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_gradients_are_the_same(name, reentrant):
    model, (documents, how) = MODELS[name]().train(), packed()
    row = {"input_ids": torch.cat(documents, 1), **how}
    cpu_kernels(model)
    want = gradients(model, row)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_gradients(gradients(model, row), want)


@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_as_near_to_float32_as_transformers_is(name):
    model, ids = MODELS[name](), tokens()
    exact = logits(model, ids)
    half = model.bfloat16()
    theirs = float((logits(half, ids) - exact).abs().mean())
    cpu_kernels(half)
    assert float((logits(half, ids) - exact).abs().mean()) <= 1.5 * theirs
    text = half.generate(ids, max_new_tokens=4, do_sample=False)
    assert text.shape == (2, 25)


def test_the_gate_of_kimi_has_finite_gradients():
    """Above a pre-activation of 88.7 transformers' are NaN."""
    model, ids = MODELS["kimi_linear"]().train(), {"input_ids": tokens()}
    with torch.no_grad():
        model.model.layers[0].self_attn.forget_gate.dt_bias[0] = 100.0
    assert not all(bool(g.isfinite().all()) for g in gradients(model, ids).values())
    cpu_kernels(model)
    assert all(bool(g.isfinite().all()) for g in gradients(model, ids).values())


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_a_step_keeps_the_limit_of_steps(name):
    """Transformers clamps the steps of Mamba-2 in a prefill and not in decoding, so that these differ."""
    model, ids = MODELS[name](), tokens(1, 12)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (2.0, float("inf"))

    def last() -> Tensor:
        with torch.no_grad():
            cache = model(ids[:, :-1], use_cache=True).cache
            found: Tensor = model(ids[:, -1:], cache=cache, use_cache=True).logits[:, -1]
        return found

    want = logits(model, ids)[:, -1]
    assert float((last() - want).abs().max()) > 1e-2
    cpu_kernels(model)
    torch.testing.assert_close(last(), want, **CLOSE)


@pytest.mark.parametrize("per_head", [True, False])
def test_a_step_of_mamba2_is_that_of_transformers(per_head):
    """With the state in place, for steps of a head and for steps of each feature; it has gradients, theirs has none."""
    from transformers.models.bamba.modeling_bamba import mamba2_selective_state_update

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    def run(step: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, A, B, C, D, bias, z = given
        if per_head:
            dt, A, D, bias = dt.expand(2, 4, 3), A.expand(4, 3, 5), D.expand(4, 3), bias.expand(4, 3)
        after = state.clone()
        y = step(after, x, dt, -A.exp(), B, C, D, z=z, dt_bias=bias, dt_softplus=True)
        return y, after

    generator = torch.Generator().manual_seed(3)
    P, N = (1, 1) if per_head else (3, 5)
    sizes = [(2, 4, 3), (2, 4, P), (4, P, N), (2, 2, 5), (2, 2, 5), (4, P), (4, P), (2, 4, 3)]
    given, state = [draw(*size) for size in sizes], draw(2, 4, 3, 5).detach()
    assert torch.autograd.gradcheck(partial(run, run_state_update), given)
    want = run(mamba2_selective_state_update, *given)
    with torch.no_grad():
        inference = run(run_state_update, *given)
    for got in (run(run_state_update, *given), inference):
        torch.testing.assert_close(got, want)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        want[0].sum().backward()


def test_trainer_takes_packed_documents(tmp_path):
    """One step of Trainer with its own collator equals one on the documents apart."""
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    documents, _ = packed()
    documents = [part for part in documents if part.shape[1] > 1]
    rows = [{"input_ids": part[0].tolist()} for part in documents]
    model = MODELS["qwen3_5"]().train()
    start = copy.deepcopy(model)
    cpu_kernels(model)
    options: dict[str, Any] = {"optim": "sgd", "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "use_cpu": True}
    options |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    told = TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=3, learning_rate=0.5, seed=1, **options
    )
    Trainer(model, told, train_dataset=rows, data_collator=DataCollatorWithFlattening()).train()
    losses = [start(input_ids=part, labels=part, use_cache=False).loss * (part.shape[1] - 1) for part in documents]
    (sum(losses) / sum(part.shape[1] - 1 for part in documents)).backward()
    for (name, p), q in zip(start.named_parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close((p - q) / 0.5, p.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_two_threads_share_a_model():
    model = MODELS["qwen3_5"]()
    cpu_kernels(model)
    rows, found = [tokens(seed=n) for n in range(4)], {}
    want = [logits(model, ids) for ids in rows]
    threads = [threading.Thread(target=lambda n=n: found.update({n: logits(model, rows[n])})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[n], want[n]) for n in range(4))


def test_models_that_change_afterwards_are_right():
    model, ids = MODELS["qwen3_5"](), tokens()
    plain = copy.deepcopy(model)
    cpu_kernels(model)
    for one in (model, plain):
        with torch.no_grad():
            one.model.layers[0].linear_attn.A_log.add_(0.3)
    torch.testing.assert_close(logits(model, ids), logits(plain, ids), **CLOSE)
    torch.testing.assert_close(logits(model.double(), ids), logits(plain.double(), ids), **CLOSE)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].linear_attn.A_log.add_(0.3)
    assert float((logits(twin, ids) - logits(model, ids)).abs().max()) > 1e-3  # each has its own weights
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(logits(loaded, ids), logits(model, ids), **CLOSE)
    layer = model.to("meta").model.layers[0].linear_attn
    assert layer(torch.empty(2, 21, 32, dtype=torch.float64, device="meta")).shape == (2, 21, 32)


def test_a_report_says_what_runs_where():
    model = MODELS["kimi_linear"]()
    found = cpu_kernels(model)
    assert str(found) == (
        "cpu_kernels of a KimiLinearForCausalLM:\n"
        "  2 KimiLinearDeltaAttention: causal_conv1d_fn, causal_conv1d_update, chunk_kimi_delta_attention, "
        "recurrent_kimi_delta_attention\n"
        "  2 KimiLinearForgetGate: forward"
    )
    found.undo()
    found.undo()
    assert str(found).startswith("cpu_kernels of a KimiLinearForCausalLM, undone:")
    layer = model.model.layers[0].self_attn
    layer.forward = layer.forward
    found = cpu_kernels(model)
    assert found.kept == {"model.layers.0.self_attn": "its forward was replaced by something else"}
    assert "model.layers.1.self_attn" in found.replaced
    second = model.model.layers[1].self_attn
    second.forward = lambda *args, **given: None
    with pytest.raises(MixerError, match="the forward of a KimiLinearDeltaAttention was replaced since"):
        found.undo()


def jamba() -> Any:
    return build("jamba", "Jamba", intermediate_size=48, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1)


def called_twice() -> nn.Module:
    model: nn.Module = MODELS["lfm2"]()
    cpu_kernels(model)
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Linear(2, 2), "Linear has no recurrent layer that the kernels can run .known are qwen3_next"),
        (jamba, "JambaForCausalLM has no recurrent layer .* .model.layers.0.mamba: Mamba-1 has no kernel here"),
        (called_twice, "model.layers.0.conv runs on the kernels already; undo that first"),
        (lambda: MODELS["lfm2"]().to("meta"), "model.layers.0.conv.conv.weight is on meta; move the model to the CPU"),
    ],
)
def test_what_cannot_run_on_the_kernels_is_refused_in_one_line(make, why):
    with pytest.raises(MixerError, match=f"^cpu_kernels: {why}") as said:
        cpu_kernels(make())
    assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"use_cache": True}, "packed documents cannot go into a cache"),
        ({"cu_seq_lens_q": torch.tensor([0, 6, 21])}, "position_ids start anew at other tokens than the documents"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 20])}, "must rise from 0 to the 21 tokens of one row"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 21]), "seq_idx": (torch.arange(21) // 9)[None]},
            "seq_idx and cu_seq_lens_q name different documents",
        ),
        ({"seq_idx": torch.zeros(1, 20)}, "seq_idx .1, 20. does not name a document of each of the 1 x 21 tokens"),
    ],
)
def test_documents_that_fit_nothing_are_refused_in_one_line(given, why):
    model, (documents, how) = MODELS["qwen3_5"](), packed()
    cpu_kernels(model)
    with pytest.raises(MixerError, match=f"^cpu_kernels: .*{why}") as said:
        model(torch.cat(documents, 1), **{"position_ids": how["position_ids"], **given})
    assert "\n" not in str(said.value)


def test_a_layer_alone_takes_documents():
    """A part of a model has no model around it that reads positions."""
    layer = MODELS["bamba"]().model.layers[0].mamba
    x, (_, how) = torch.randn(1, sum(LENGTHS), 32), packed()
    want = torch.cat([layer(part) for part in x.split(LENGTHS, 1)], 1)
    with cpu_kernels(layer) as found:
        assert list(found.replaced) == [""]
        for name in ("cu_seq_lens_q", "seq_idx"):
            torch.testing.assert_close(layer(x, **{name: how[name]}), want, **CLOSE)
        ends = torch.cat([torch.zeros(1), how["cu_seq_lens_q"], torch.tensor([21.0])]).int()  # two empty documents
        torch.testing.assert_close(layer(x, cu_seq_lens_q=ends), want, **CLOSE)


def test_one_document_goes_on_from_a_cache():
    """Where it is told to be one; the first token of a call starts no document then."""
    model, ids = MODELS["qwen3_5"](), tokens(1)
    want = logits(model, ids)
    cpu_kernels(model)
    with torch.no_grad():
        cache, parts = None, []
        for part in ids.split([12, 8, 1], 1):
            ends = torch.tensor([0, part.shape[1]])
            given = {} if part.shape[1] == 8 else {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            out = model(part, use_cache=True, cache=cache, **given)
            cache = out.cache
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), want, **CLOSE)
    for told in ({"seq_idx": (torch.arange(21) // 9)[None]}, {"position_ids": (torch.arange(21) % 9)[None]}):
        with pytest.raises(MixerError, match="packed documents cannot go into a cache"):
            model(ids, cache=cache, **told)


def test_a_compiled_model_is_the_same():
    """Also where documents break the graph, so that each layer is compiled by itself: they share no code."""
    model, ids, (documents, how) = MODELS["qwen3_5"](), tokens(), packed()
    want = logits(model, ids)
    apart = torch.cat([logits(model, part) for part in documents], 1)
    cpu_kernels(model)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(logits(compiled, ids), want, **CLOSE)
    row = torch.cat(documents, 1)
    torch.testing.assert_close(logits(compiled, row, position_ids=how["position_ids"]), apart, **CLOSE)


def test_wide_heads_and_an_own_gate_are_the_same():
    """Falcon-H1 without its norm hands the gate to the step."""
    wide = BAMBA | {"mamba_d_state": 130, "mamba_rms_norm": False}
    model = build(
        "falcon_h1", "FalconH1", intermediate_size=48, head_dim=16, num_hidden_layers=1, mamba_d_ssm=64, **wide
    )
    ids = tokens()
    want = model.generate(ids, max_new_tokens=6, do_sample=False)
    cpu_kernels(model)
    assert_same_text(model, model.generate(ids, max_new_tokens=6, do_sample=False), want)
