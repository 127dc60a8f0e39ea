"""Attention of one's own: an adapter describes it, surgery verifies and replaces it."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tokenmix import MixerError
from tokenmix.export import OnnxModel, export_onnx
from tokenmix.hosts import AttentionAdapter, find_attention, replace_mixers, restore, save_replaced
from tokenmix.hosts.surgery.capture import adapters_by_site, capture_calls, layer_losses
from tokenmix.lab.advise.compare import compare
from tokenmix.lab.advise.inputs import own_inputs
from tokenmix.lab.train import distill


class CausalSelfAttention(nn.Module):
    """As nanoGPT's: one fused projection, the causal mask a buffer."""

    def __init__(self, dim: int = 32, heads: int = 4, cap: float = 0.0):
        super().__init__()
        self.n_head, self.cap = heads, cap
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim, bias=False)
        self.resid_dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (a.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for a in self.c_attn(x).chunk(3, -1))
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        logits = self.cap * torch.tanh(logits / self.cap) if self.cap else logits
        order = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        y = logits.masked_fill(~order, -torch.inf).softmax(-1) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(-2)))


class Reader(nn.Module):
    """Grouped keys, its own mask, another sequence where one is given, tokens before rows, and two outputs."""

    def __init__(self, dim: int = 32, heads: int = 4, groups: int = 2, cross: bool = False):
        super().__init__()
        self.heads, self.groups, self.cross = heads, groups, cross
        self.into = nn.ModuleDict(
            {"q": nn.Linear(dim, dim), "k": nn.Linear(dim, dim // 2), "v": nn.Linear(dim, dim // 2)}
        )
        self.back = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.1))

    def forward(
        self, tokens: Tensor, memory: Tensor | None = None, padding: Tensor | None = None, tag: str = ""
    ) -> Any:
        source = tokens if memory is None else memory
        q = self.into["q"](tokens).unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3)
        k, v = (
            self.into[part](source).unflatten(-1, (self.groups, -1)).permute(1, 2, 0, 3).repeat_interleave(2, 1)
            for part in ("k", "v")
        )
        keep = None if padding is None else ~padding[:, None, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return tag, self.back(y.permute(2, 0, 1, 3).flatten(-2))


class Turned(nn.Module):
    """Rotary positions from tables that the model passes."""

    num_heads = 4

    def __init__(self, dim: int = 32):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
        cos, sin = table
        q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (a * cos + torch.cat([-a[..., 4:], a[..., :4]], -1) * sin for a in (q, k))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)), None


def rotary_table(module: nn.Module, x: Tensor) -> dict[str, Any]:
    angles = torch.arange(x.shape[1])[:, None] * 100.0 ** -(torch.arange(4) / 4)
    angles = torch.cat([angles, angles], -1)
    return {"table": (angles.cos(), angles.sin())}


class Model(nn.Module):
    """Layers of any attention, with residual sums; returns logits."""

    def __init__(self, *layers: nn.Module, dim: int = 32):
        super().__init__()
        self.embed, self.head = nn.Embedding(60, dim), nn.Linear(dim, 60)
        self.blocks = nn.ModuleList(nn.ModuleDict({"attn": layer, "norm": nn.LayerNorm(dim)}) for layer in layers)

    def forward(self, ids: Tensor, **given: Any) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            y = block["attn"](block["norm"](x), **given)
            x = x + (y[0] if isinstance(y, tuple) else y)
        return self.head(x)


GPT = AttentionAdapter(
    CausalSelfAttention,
    qkv="c_attn",
    out="c_proj",
    heads="n_head",
    causal=True,
    dropout="resid_dropout",
)
READER = AttentionAdapter(
    "Reader",
    qkv=("into.q", "into.k", "into.v"),
    out="back.0",
    heads="heads",
    kv_heads="groups",
    cross="cross",
    hidden="tokens",
    context="memory",
    mask="padding",
    mask_means="hide",
    returns=("tag", "output"),
    batch_first=False,
    dropout="back.1",
)
TURNED = AttentionAdapter(
    Turned,
    causal=True,
    ignored=("table",),
    returns=("output", None),
    softmax={"positions": {"name": "rotary", "base": 100.0}},
    example=rotary_table,
)
IDS = torch.randint(60, (3, 9), generator=torch.Generator().manual_seed(0))


def make(*layers: nn.Module) -> Any:
    torch.manual_seed(0)
    model = Model(*layers)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.eval()


def gpt(**options: Any) -> Any:
    return make(CausalSelfAttention(**options), CausalSelfAttention(**options))


def equal(a: nn.Module, b: nn.Module) -> bool:
    theirs = b.state_dict()
    return a.state_dict().keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in a.state_dict().items())


def test_a_fused_projection_is_found_replaced_and_restored():
    model = gpt()
    sites = find_attention(model, adapter=GPT)
    assert [(s.name, s.family, s.heads, s.head_dim, s.causal) for s in sites] == [
        (f"blocks.{i}.attn", "own", 4, 8, True) for i in range(2)
    ]
    assert find_attention(model) == []
    same, report = replace_mixers(model, {"blocks.*.attn": "attention"}, adapter=GPT)
    assert report.share == 1
    assert not report.notes
    assert torch.allclose(same(IDS), model(IDS), atol=1e-5)
    back, _ = restore(same)
    assert equal(back, model)
    assert torch.equal(back(IDS), model(IDS))
    fast, report = replace_mixers(model, {"blocks.1.attn": {"name": "hydra"}}, adapter=(READER, GPT), seed=0)
    assert "1 x its own attention" in report.target
    assert not torch.allclose(fast(IDS), model(IDS), atol=1e-2)
    assert torch.allclose(fast(IDS[:, :4]), fast(IDS)[:, :4], atol=1e-5)  # causal
    assert equal(restore(fast)[0], model)


def test_the_dropout_of_the_output_stays():
    model = gpt()
    model.blocks[0]["attn"].resid_dropout.p = 1.0
    new, _ = replace_mixers(model, "attention", adapter=GPT)
    assert bool((new.train().blocks[0]["attn"](torch.randn(1, 3, 32)) == 0).all())


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("spec", ["attention", "linear"])
def test_arguments_and_outputs_are_the_hosts(cross, spec):
    torch.manual_seed(0)
    reader = nn.ModuleList([Reader(cross=cross)]).eval()
    x, memory = torch.randn(7, 3, 32), torch.randn(5, 3, 32)
    padding = torch.zeros(3, 5 if cross else 7, dtype=torch.bool)
    padding[1, 3:] = True
    new, _ = replace_mixers(reader, spec, adapter=READER, seed=0)
    given = (x, memory if cross else None, padding)
    (tag, y), (other, wanted) = new[0](*given, tag="a"), reader[0](*given, tag="a")
    assert (tag, other, y.shape) == ("a", "a", wanted.shape)
    real = slice(None) if cross else ~padding.T
    assert torch.allclose(y[real], wanted[real], atol=1e-5) == (spec == "attention")
    if cross:
        changed = memory.clone()
        changed[3:, 1] = 9
        assert torch.allclose(new[0](x, changed, padding)[1], y, atol=1e-5)
    back, _ = restore(new)
    assert equal(back, reader)


def test_rotary_tables_of_the_host():
    model = make(Turned(), Turned())
    table = rotary_table(model, torch.zeros(1, 9, 1))
    same, _ = replace_mixers(model, "attention", adapter=TURNED)
    assert torch.allclose(same(IDS, **table), model(IDS, **table), atol=1e-5)
    other, report = replace_mixers(model, "aft_simple", adapter=TURNED, seed=0)
    assert report.notes == ("positions were rotary; aft_simple does not rotate queries and keys",)
    assert other(IDS, **table).shape == (3, 9, 60)


WINDOWS = {
    "timm": (
        lambda: timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4)
        ),
        AttentionAdapter(
            "WindowAttention",
            qkv="qkv",
            out="proj",
            mask="mask",
            mask_axes="BTS",
            mask_means="add",
            hidden_below=-100.0,
            tokens="window_area",
            dropout="proj_drop",
            beyond={"relative_position_bias_table": "a bias of positions within the window"},
        ),
    ),
    "transformers": (
        lambda: transformers.SwinModel(
            transformers.SwinConfig(image_size=64, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
        ),
        AttentionAdapter(
            "SwinAttention",
            out="o_proj",
            heads="num_attention_heads",
            hidden="hidden_states",
            mask="attention_mask",
            mask_axes="BTS",
            mask_means="add",
            hidden_below=-100.0,
            returns=("output", None),
            tokens=16,
            beyond={"relative_position_bias.relative_position_bias_table": "a bias of positions within the window"},
        ),
    ),
}


@pytest.mark.parametrize("library", WINDOWS)
def test_windows_are_served_and_their_bias_is_named(library):
    torch.manual_seed(0)
    model, images = WINDOWS[library][0]().eval(), torch.randn(2, 3, 64, 64)
    adapter = WINDOWS[library][1]
    assert len(find_attention(model, adapter)) == 4
    with pytest.raises(MixerError, match="a bias of positions within the window, which the mixer attention has not"):
        replace_mixers(model, "attention", adapter=adapter)
    new, report = replace_mixers(model, {"name": "aft_full", "max_len": 16}, adapter=adapter, seed=0)
    assert report.notes == ("attention had a bias of positions within the window; aft_full leaves that out",)

    def output(model: Any) -> Tensor:
        found = model(images)
        return found if isinstance(found, Tensor) else found.last_hidden_state

    assert output(new).shape == output(model).shape
    back, _ = restore(new)
    assert equal(back, model)
    assert torch.equal(output(back), output(model))
    drawn, _ = replace_mixers(model, "linear", adapter=adapter, init="random", seed=0)
    with pytest.raises(MixerError, match="relative_position_bias_table of its attention was not kept"):
        restore(drawn)


WRONG = [
    ({"qkv": "qkv"}, "blocks.0.attn: a CausalSelfAttention has no qkv.weight; it has c_attn.weight, c_attn.bias"),
    ({"heads": "num_heads"}, "a CausalSelfAttention has no 'num_heads', which the adapter gives as heads"),
    ({"heads": 5}, r"heads=5 and kv_heads=5 do not divide c_attn.weight of shape \(96, 32\)"),
    ({"causal": False}, "its CausalSelfAttention is not softmax attention with its weights: outputs differ by"),
    ({"heads": 8}, "its CausalSelfAttention is not softmax attention with its weights: outputs differ by"),
    ({"by_head": True}, "its CausalSelfAttention is not softmax attention with its weights: outputs differ by"),
    ({"hidden": "tokens"}, "cannot be called as its adapter says .*unexpected keyword argument 'tokens'"),
    ({"softmax": {"scale": 1.0}}, "is not softmax attention with its weights: outputs differ by"),
    ({"returns": ("output", None)}, r"attention returns a Tensor, and returns=\('output', None\) was expected"),
    ({"beyond": {"softcap": "a cap"}}, "has no 'softcap', which the adapter names in beyond"),
    ({"mask_axes": "TB"}, "AttentionAdapter: mask_axes='TB' is none of"),
    ({"returns": ("y", None)}, "AttentionAdapter: returns=.* is none of"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_a_wrong_description_is_one_line_that_names_the_difference(options, message):
    given = {"qkv": "c_attn", "out": "c_proj", "heads": "n_head", "causal": True} | options
    with pytest.raises(MixerError, match=message) as why:
        replace_mixers(gpt(), "attention", adapter=AttentionAdapter(CausalSelfAttention, **given))
    assert "\n" not in str(why.value)


def test_what_no_adapter_is():
    with pytest.raises(
        MixerError, match=r"adapter must be a tokenmix.hosts.AttentionAdapter or a list of them, got 'x'"
    ):
        replace_mixers(gpt(), "attention", adapter="x")


def test_a_cap_is_named_refused_for_attention_and_told_of_other_mixers():
    model = gpt(cap=5.0)
    with pytest.raises(MixerError, match=r"is not softmax attention with its weights: .* it has cap=5.0"):
        replace_mixers(model, "hydra", adapter=GPT)
    capped = AttentionAdapter(
        CausalSelfAttention, qkv="c_attn", out="c_proj", heads="n_head", causal=True, beyond={"cap": "a cap on logits"}
    )
    with pytest.raises(MixerError, match="attention here has a cap on logits, which the mixer attention has not; keep"):
        replace_mixers(model, "attention", adapter=capped)
    assert replace_mixers(model, "hydra", adapter=capped, seed=0)[1].notes == (
        "attention had a cap on logits; hydra leaves that out",
    )


def test_tensors_and_caches_without_a_place_are_refused_in_the_call():
    model = make(Turned())
    strict = AttentionAdapter(
        Turned, causal=True, returns=("output", None), softmax=TURNED.softmax, example=rotary_table
    )
    with pytest.raises(MixerError, match="gets tensors as 'table'; name it in the adapter, under ignored"):
        replace_mixers(model, "attention", adapter=strict)
    cached = AttentionAdapter(Turned, causal=True, cache=("table",), returns=("output", None), softmax=TURNED.softmax)
    with pytest.raises(MixerError, match="cannot be called"):  # the host's own needs its table
        replace_mixers(model, "attention", adapter=cached)


def test_the_refusal_of_an_unknown_model_names_both_ways():
    with pytest.raises(
        MixerError,
        match=r"it has CausalSelfAttention, whose computation is unknown; .* Describe another "
        r"class by adapter=tokenmix.hosts.AttentionAdapter\(...\); or assign a mixer by hand, layer.attn =",
    ):
        replace_mixers(gpt(), "hydra")
    mixed = make(CausalSelfAttention(), nn.Identity())
    mixed.other = nn.MultiheadAttention(32, 4)
    with pytest.raises(
        MixerError,
        match=r"pattern 'blocks.\*.attn' matches a CausalSelfAttention, whose computation is "
        r"unknown. Describe another class by adapter=",
    ):
        replace_mixers(mixed, {"blocks.*.attn": "hydra"})


def test_a_folder_cannot_describe_an_adapter(tmp_path):
    library, adapter = WINDOWS["transformers"]
    new, report = replace_mixers(library(), "linear", adapter=adapter, seed=0)
    with pytest.raises(MixerError, match="holds no AttentionAdapter"):
        save_replaced(new, report, tmp_path / "out")


def test_a_described_model_is_distilled_compared_and_exported(tmp_path):
    teacher = gpt()
    student, _ = replace_mixers(teacher, "linear", adapter=GPT, init="random", seed=0)
    data = [torch.randint(60, (4, 12), generator=torch.Generator().manual_seed(i)) for i in range(4)]
    found = distill(teacher, student, data, out=tmp_path / "run", layer_steps=60, steps=1, valid=data[:1], lr=1e-2)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    for name in ("blocks.0.attn", "blocks.1.attn"):
        assert found["valid"]["layer_loss"][name] < 0.9 * first["layer_loss"][name]
    models = {"teacher": teacher, "student": student.eval()}
    inputs = own_inputs(lambda length, batch: torch.zeros(batch, length, dtype=torch.long), teacher, "here")
    told = compare(models, data[:2], [16], inputs=inputs, seconds=0.2)
    assert [row[0] for row in told.table().rows] == ["teacher", "student"]

    def tokens(length: int, batch: int) -> Tensor:
        return torch.randint(60, (batch, length), generator=torch.Generator().manual_seed(length))

    report = export_onnx(student, tmp_path / "model.onnx", inputs=tokens, length=12)
    ids = tokens(12, 2)
    given = OnnxModel(tmp_path / "model.onnx")(ids)
    assert report.difference < 1e-4
    assert torch.allclose(given, student(ids), atol=1e-4)


@pytest.mark.parametrize("cross", [False, True])
@torch.no_grad()
def test_layers_of_any_form_are_compared_on_the_teachers_inputs(cross):
    torch.manual_seed(0)
    teacher = nn.ModuleList([Reader(cross=cross)]).eval()
    x, memory = torch.randn(7, 3, 32), torch.randn(5, 3, 32)
    padding = torch.zeros(3, 5 if cross else 7, dtype=torch.bool)
    padding[1, 3:] = True
    for spec, same in (("attention", True), ("linear", False)):
        adapters = adapters_by_site(replace_mixers(teacher, spec, adapter=READER, seed=0)[0])
        with capture_calls(teacher, adapters) as calls:
            teacher[0](x, memory if cross else None, padding)
        (loss,) = layer_losses(adapters, calls).values()
        assert (float(loss) < 1e-9) == same
