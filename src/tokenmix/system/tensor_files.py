"""Files of tensors in the safetensors format. Nothing is unpickled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ..errors import MixerError
from .files import whole_file


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a file, completely or not at all.

    Of tied tensors one is written; the metadata names it for each of the others, as ``safetensors.torch.save_model``
    does.
    """
    try:
        from safetensors.torch import save
    except ImportError as why:
        raise MixerError(f"{path}: writing it needs safetensors: pip install 'tokenmix[train]' ({why}).") from None
    written: dict[str, Tensor] = {}
    tied, first = {"format": "pt"}, dict[object, str]()
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and first.setdefault(place, name) != name:
            tied[name] = first[place]
        else:
            own = tensor.detach().cpu().contiguous()
            written[name] = own if own.untyped_storage().nbytes() == own.nbytes else own.clone()
    with whole_file(path) as f:
        f.write(save(written, tied))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a file, tied ones under each of their names."""
    try:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as f:
                found = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  # no dict
                tied = f.metadata() or {}
        except (SafetensorError, OSError) as why:
            said = " ".join(str(why).split())[:160]
            raise MixerError(f"{path}: is truncated or not a safetensors file ({said}).") from None
    except ImportError as why:
        raise MixerError(f"{path}: reading it needs safetensors: pip install 'tokenmix[train]' ({why}).") from None
    return found | {name: found[other] for name, other in tied.items() if other in found and name not in found}
