"""Write what the recurrent layers of transformers call as a folder in the format of the Hub's kernels."""

from __future__ import annotations

import base64
import hashlib
from inspect import Parameter, Signature, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ..system.files import write_file, write_json
from .recurrent_functions import ARGUMENTS, FUNCTIONS

HUB_NAMES = {
    "causal_conv1d_fn": "causal_conv1d_fn",
    "causal_conv1d_update": "causal_conv1d_update",
    "chunk_gated_delta_rule": "torch_chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule": "torch_recurrent_gated_delta_rule",
    "chunk_kda": "chunk_kimi_delta_attention",
    "fused_recurrent_kda": "recurrent_kimi_delta_attention",
    "mamba_chunk_scan_combined": "mamba2_chunk_scan",
    "mamba_split_conv1d_scan_combined": "mamba2_split_conv1d_scan_combined",
    "selective_state_update": "mamba2_selective_state_update",
}
"""Name on the Hub of a function of transformers -> its name in transformers."""


def _build_layer(name: str) -> type[nn.Module]:
    """Build the class whose ``forward`` the package ``kernels`` puts in place of a function of transformers."""
    run, names = FUNCTIONS[name], ARGUMENTS[name]

    def forward(self: Any, first: Tensor, *args: Any, **given: Any) -> Any:
        if not first.is_cpu:
            return type(self).forward(self, first, *args, **given)  # transformers' own
        return run(first, **dict(zip(names[1:], args, strict=False)), **given)

    takes = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in ("self", *names)]
    takes += [each for each in signature(run).parameters.values() if each.kind is Parameter.VAR_KEYWORD]
    vars(forward)["__signature__"] = Signature(takes)  # kernels compares it with that of the function
    return type(name, (nn.Module,), {"forward": forward, "can_torch_compile": True})


layers = SimpleNamespace(**{hub: _build_layer(name) for hub, name in HUB_NAMES.items()})
"""What the folder exports: a class for each name."""

PROGRAM = b"""from tokenmix.hosts.kernel_folder import layers

__all__ = ["layers"]
"""


def write_kernel_folder(folder: str | Path) -> tuple[str, ...]:
    """Write a folder in the format of the Hub's kernels: the functions of ``cpu_kernels``, for transformers' own door.

    The package ``kernels`` loads it by ``LocalLayerRepository``, and transformers calls its layers in all models of
    the process where they are registered for the device ``cpu``. The folder holds no code but an import of tokenmix.

    Args:
        folder: where to write; files of an earlier call are written anew.

    Returns:
        The names of the layers, which are those that transformers gives the functions.

    Raises:
        OSError: the folder cannot be written.
    """
    variant = Path(folder) / "build" / "torch-universal"  # "torch-cpu" is refused where torch was built for CUDA
    variant.mkdir(parents=True, exist_ok=True)
    write_file(variant / "__init__.py", PROGRAM)
    digest = base64.b64encode(hashlib.sha256(PROGRAM).digest()).decode()
    metadata = {"name": "tokenmix", "id": "_tokenmix_cpu", "version": 1, "license": "Apache-2.0", "python-depends": []}
    metadata |= {"backend": {"type": "cpu"}, "digest": {"algorithm": "sha256", "files": {"__init__.py": digest}}}
    write_json(variant / "metadata.json", metadata)
    return tuple(HUB_NAMES)
