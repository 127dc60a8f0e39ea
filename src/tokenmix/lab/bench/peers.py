"""Public implementations as layers on the same tensors, for ``--against peers``.

None of them is a dependency; one that is missing is named.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import nn

from ...errors import MixerError
from ...types import Options


@dataclass(frozen=True)
class Peer:
    """One public layer: its package, how it is built, whether it has a causal form, and its limits.

    pairs: whether it stores numbers for every pair of tokens. longest: the length beyond which a call takes minutes;
    ``note`` gives the reason. unlike: why its values cannot be compared with those of its own float64 form.
    """

    package: str
    make: Callable[..., nn.Module]
    causal: bool
    pairs: bool = False
    longest: int | None = None
    unlike: str = ""
    note: str = ""


def _get(path: str) -> Any:
    module, _, name = path.rpartition(".")
    with (
        contextlib.redirect_stdout(io.StringIO()),
        warnings.catch_warnings(),
    ):  # some print a greeting, some warn on import
        warnings.simplefilter("ignore")
        return getattr(import_module(module), name)


def _aft(name: str, *more: str) -> Callable[..., nn.Module]:
    def make(dim: int, heads: int, length: int, causal: bool, **options: object) -> nn.Module:
        return _get(f"aft_pytorch.{name}")(
            max_seqlen=length, dim=dim, hidden_dim=dim, **{k: v for k, v in options.items() if k in more}
        )

    return make


def _performer(dim: int, heads: int, length: int, causal: bool, **options: object) -> nn.Module:
    return _get("performer_pytorch.SelfAttention")(dim, heads=heads, dim_head=dim // heads, causal=causal, **options)


def _linformer(dim: int, heads: int, length: int, causal: bool, **options: object) -> nn.Module:
    return _get("linformer.LinformerSelfAttention")(dim, seq_len=length, heads=heads, **options)


def _nystrom(dim: int, heads: int, length: int, causal: bool, **options: object) -> nn.Module:
    return _get("nystrom_attention.NystromAttention")(dim=dim, heads=heads, dim_head=dim // heads, **options)


def _local(dim: int, heads: int, length: int, causal: bool, **options: object) -> nn.Module:
    given = {"window_size": 128, "exact_windowsize": True, **options}
    return _get("local_attention.LocalMHA")(dim=dim, heads=heads, dim_head=dim // heads, causal=causal, **given)


def _reformer(dim: int, heads: int, length: int, causal: bool, **options: object) -> nn.Module:
    given = {"bucket_size": max(1, min(64, length // 2)), **options}
    return _get("reformer_pytorch.LSHSelfAttention")(dim, heads=heads, causal=causal, **given)


def _x_transformers(dim: int, heads: int, length: int, causal: bool, **options: object) -> nn.Module:
    return _get("x_transformers.x_transformers.Attention")(
        dim=dim, heads=heads, dim_head=dim // heads, causal=causal, **options
    )


PEERS: dict[str, Peer] = {
    "aft_pytorch.AFTFull": Peer("aft-pytorch", _aft("AFTFull"), causal=False, pairs=True, note="has no causal form"),
    "aft_pytorch.AFTSimple": Peer("aft-pytorch", _aft("AFTSimple"), causal=False, note="has no causal form"),
    "aft_pytorch.AFTLocal": Peer(
        "aft-pytorch",
        _aft("AFTLocal", "s"),
        causal=False,
        pairs=True,
        longest=256,
        unlike="rebuilds its bias in float32 in each call",
        note="reads T x T numbers one by one in Python in each call",
    ),
    "performer_pytorch.SelfAttention": Peer("performer-pytorch", _performer, causal=True),
    "linformer.LinformerSelfAttention": Peer("linformer", _linformer, causal=False, note="has no causal form"),
    "nystrom_attention.NystromAttention": Peer("nystrom-attention", _nystrom, causal=False, note="has no causal form"),
    "local_attention.LocalMHA": Peer("local-attention", _local, causal=True, note="window 128"),
    "reformer_pytorch.LSHSelfAttention": Peer(
        "reformer-pytorch", _reformer, causal=True, unlike="draws new hashes in each call"
    ),
    "x_transformers.Attention": Peer(
        "x-transformers", _x_transformers, causal=True, pairs=True, note="softmax attention"
    ),
}
"""Layers (B, T, D) -> (B, T, D) by "package.Class"."""


def build_peer(name: str, dim: int, *, heads: int, length: int, causal: bool, options: Options) -> nn.Module:
    """Build the layer, or say in one line what to install or what is not supported."""
    peer = PEERS[name]
    version(peer.package)
    if causal and not peer.causal:
        raise MixerError(f"bench: {name} {peer.note}.")
    if peer.longest is not None and length > peer.longest:
        raise MixerError(f"bench: {name} {peer.note}; it is measured up to {peer.longest} tokens.")
    with contextlib.redirect_stdout(io.StringIO()):  # stdout may be JSON
        return peer.make(dim, heads, length, causal, **{k: v for k, v in options.items() if k != "causal"})


def version(package: str) -> str:
    """Return the installed version of a package; raise MixerError if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise MixerError(f"bench: {package} is not installed; `pip install {package}`.") from None
