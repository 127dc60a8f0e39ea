"""Cases of ``test_kernels_hub.py``: the kernels enter through transformers' own door, the package ``kernels``.

transformers decides when it is imported whether its functions are modules that this door can change, and takes a few
versions of the package alone. Here it takes the one that is installed, so this file has a process for itself.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch
from kernels import LocalLayerRepository, Mode, get_local_kernel, register_kernel_mapping, use_kernel_mapping
from kernels._rust import Digest, DigestAlgorithm, Metadata
from transformers.utils import import_utils

import_utils.is_kernels_available.__wrapped__.__defaults__ = ("0.17", "1.0")
import_utils.is_kernels_available.cache_clear()

from transformers.integrations.hub_kernels import kernelize  # noqa: E402

from hybrid_models import MODELS  # noqa: E402  # after the door is open
from test_kernels_hybrids import (  # noqa: E402
    CLOSE,
    assert_same_gradients,
    assert_same_text,
    gradients,
    logits,
    packed,
    tokens,
)
from tokenmix import MixerError  # noqa: E402
from tokenmix.hosts import cpu_kernels, write_kernel_folder  # noqa: E402

SHARED = {"qwen3_5": "qwen3_next", "bamba": "mamba2"}
"""Families whose functions have the names of another's, in a file of their own."""


def functions(model: Any) -> dict[str, Any]:
    """Return the functions of the model's recurrent layers, which are modules here."""
    found = {name: f for part in model.modules() for name, f in getattr(part, "_kernel_funcs", {}).items()}
    return {name: f for name, f in found.items() if name != "rotary_pos_emb"}


def ours(model: Any) -> set[str]:
    """Return the names of those functions that are ours."""
    return {name for name, f in functions(model).items() if f.forward.__func__.__module__.startswith("tokenmix.")}


def close_door(model: Any) -> None:
    """Undo by ``kernels``' own means: without a mapping it puts the functions of transformers back."""
    with use_kernel_mapping({}, inherit_mapping=False):
        kernelize(model)


@pytest.fixture
def names(tmp_path, monkeypatch):
    """The names of the layers of a folder that is registered for the CPU, without a network."""

    def refuse(*args: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    found = write_kernel_folder(tmp_path)
    with use_kernel_mapping({}):
        register_kernel_mapping({name: {"cpu": LocalLayerRepository(tmp_path, layer_name=name)} for name in found})
        yield found


@pytest.mark.parametrize("name", MODELS)
def test_the_door_gives_the_same_numbers_and_goes_back(name, names):
    model, ids = MODELS[name](), tokens()
    want, text = logits(model, ids), model.generate(ids, max_new_tokens=6, do_sample=False)
    grads = gradients(model.train(), {"input_ids": ids})
    model.eval().use_kernels = True
    assert ours(model) == functions(model).keys() <= set(names)
    torch.testing.assert_close(logits(model, ids), want, **CLOSE)
    assert_same_text(model, model.generate(ids, max_new_tokens=6, do_sample=False), text)
    assert_same_gradients(gradients(model.train(), {"input_ids": ids}), grads)
    assert ours(model) == functions(model).keys()  # train() goes through the door again
    close_door(model.eval())
    assert not ours(model)
    assert torch.equal(logits(model, ids), want)


def test_a_model_behind_the_door_is_compiled(names):
    model, ids = MODELS["qwen3_5"](), tokens()
    want = logits(model, ids)
    kernelize(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE)
    assert ours(model) == functions(model).keys()
    torch.testing.assert_close(logits(torch.compile(model, backend="aot_eager"), ids), want, **CLOSE)
    close_door(model)


@pytest.mark.parametrize("name", SHARED)
def test_the_door_changes_every_model_of_a_family_and_cpu_kernels_one(name, names):
    """Which is why ``cpu_kernels`` does not go through it."""
    model, other, apart = MODELS[name](), MODELS[name](), MODELS[SHARED[name]]()
    with cpu_kernels(model):
        assert not ours(model) | ours(other) | ours(apart)
    model.use_kernels = True
    assert ours(other) == functions(other).keys()
    assert not ours(apart)
    close_door(model)


def test_documents_are_apart_behind_the_door_where_each_layer_is_told(names):
    """Recurrent layers by ``seq_idx``, softmax layers by ``position_ids``; ``cpu_kernels`` needs one of the two."""
    model, (documents, how) = MODELS["qwen3_5"](), packed()
    row, want = torch.cat(documents, 1), torch.cat([logits(model, part) for part in documents], 1)
    model.use_kernels = True
    torch.testing.assert_close(logits(model, row, **how), want, **CLOSE)
    for name in ("seq_idx", "position_ids"):
        assert float((logits(model, row, **{name: how[name]}) - want).abs().max()) > 0.1
    close_door(model)


def test_cpu_kernels_leaves_a_forward_that_the_door_has_set(names):
    """Qwen3.5's whole layer has a name; transformers sets its ``forward`` anew with each change of mode."""
    model = MODELS["qwen3_5"]()
    model.use_kernels = True
    with pytest.raises(MixerError, match="its forward was replaced by something else"):
        cpu_kernels(model)
    close_door(model)


def test_other_devices_have_the_functions_of_transformers(names):
    model = MODELS["bamba"]()
    model.use_kernels = True
    layer = model.to("meta").model.layers[0].mamba
    assert layer(torch.empty(2, 21, 32, device="meta")).shape == (2, 21, 32)
    close_door(MODELS["bamba"]())


def test_the_config_of_transformers_knows_no_cpu(tmp_path):
    """So the mapping of ``kernels`` itself is what takes the folder."""
    from transformers import KernelConfig

    name, *_ = write_kernel_folder(tmp_path)
    config = KernelConfig({name: f"{tmp_path}:{name}"}, use_local_kernel=True)
    with pytest.raises(ValueError, match="Only devices in .* are supported, got: cpu"):
        MODELS["lfm2"]().set_use_kernels(True, config)


def test_the_folder_has_the_format_of_the_hub(tmp_path):
    names = write_kernel_folder(tmp_path)
    assert write_kernel_folder(tmp_path) == names
    loaded = get_local_kernel(tmp_path)
    assert set(vars(loaded.layers)) == set(names)
    variant = tmp_path / "build" / "torch-universal"
    told = Metadata.read_from_file(variant / "metadata.json").digest.files
    assert told == {"__init__.py": Digest.hash_variant(DigestAlgorithm.SHA256, variant).files["__init__.py"]}
