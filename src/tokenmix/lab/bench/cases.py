"""What can be measured: an operation on q, k and v, a layer with its projections, one decoded token, or a training
step.

A subject is a name with options and a backend; ``prepare`` turns it into a call on tensors of one setting. Tensors are
seeded by the setting alone, so all subjects of a setting that read q, k and v, or x, read the same ones.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import functional
from ...errors import MixerError
from ...functional.layout.heads import by_head
from ...kernels.backend import Backend
from ...mixers import MIXERS, Inputs, Mixer, State, build_mixer
from ...models import LM, LMConfig
from ...testing.measure import leaves_of
from ...types import Options, Spec
from .flops import Setting, Work, layer_work, model_work, op_work, work_of
from .peers import PEERS, build_peer
from .timing import Call

LEVELS = ("op", "layer", "decode", "model")
SDPA, ATTENTION = "sdpa", "attention"
"""torch's fused softmax attention, the baseline of every row, and the mixer that computes the same function."""
CHUNK = 256
READING = 90
"""The longest time in seconds for reading the context before a decoded token."""
AHEAD = 32
"""Tokens that a timed stream goes on for before it returns to its context."""
GIVEN = ("q", "k", "v", "x")
"""Arguments of functional forms that hold tokens; the others are parameters."""


@dataclass(frozen=True)
class BenchSubject:
    """A mixer of ``MIXERS``, ``sdpa`` or, as "package.Class", a public implementation of ``PEERS``, and its options."""

    name: str
    options: Options = field(default_factory=dict)
    backend: str = "auto"

    @property
    def label(self) -> str:
        """Name, options and backend as written on the command line."""
        given = ",".join(
            f"{k}={'none' if v is None else v if isinstance(v, str) else json.dumps(v)}"
            for k, v in self.options.items()
        )
        return self.name + (f":{given}" if given else "") + (f"@{self.backend}" if self.backend != "auto" else "")

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Run calls inside on this subject's backend."""
        with functional.use_backend(cast(Backend, self.backend)):
            yield


@dataclass
class Prepared:
    """A call that can be repeated, and the work it stands for."""

    call: Call
    work: Work


def parse_subjects(text: str) -> list[BenchSubject]:
    """Parse subjects such as "aft_simple,aft_local:window=32,rank=none,hydra@eager".

    A piece with = and no name belongs to the subject before it.
    """
    pieces: list[str] = []
    for piece in filter(None, (p.strip() for p in text.split(","))):
        if pieces and "=" in piece and not re.match(r"[\w.]+:", piece):
            pieces[-1] += f"{',' if ':' in pieces[-1] else ':'}{piece}"
        else:
            pieces.append(piece)
    return [_subject(piece) for piece in pieces]


def _subject(text: str) -> BenchSubject:
    text, _, backend = text.partition("@")
    name, _, given = text.partition(":")
    options = {}
    for pair in filter(None, re.split("[,:]", given)):
        key, equals, value = pair.partition("=")
        if not equals:
            raise MixerError(f"bench: {pair!r} in {text!r} is not an option; write name:option=value,option=value.")
        options[key] = _value(value)
    known = [*MIXERS, SDPA, *PEERS]
    if name not in known:
        from ...system.config import nearest

        raise MixerError(f"bench: {name!r} is not a subject that can be measured; {nearest(name, known)}.")
    return BenchSubject(name, options, backend or "auto")


def _value(text: str) -> object:
    words = {"none": None, "null": None, "true": True, "false": False}
    try:
        return words[text.lower()] if text.lower() in words else json.loads(text)
    except ValueError:
        return text


def is_causal(subject: BenchSubject, s: Setting) -> bool:
    """Return whether this subject runs causally.

    The setting decides unless the subject's options say otherwise or it has only the other form.
    """
    if subject.name in PEERS:
        forms: tuple[bool, ...] = (False, True) if PEERS[subject.name].causal else (False,)
    else:
        forms = (False, True) if subject.name == SDPA else MIXERS[subject.name].facts.causal_forms()
    return bool(subject.options.get("causal", s.causal if s.causal in forms else forms[0]))


def build(subject: BenchSubject, s: Setting, max_len: int | None = None) -> Any:
    """Build the layer: a mixer with usual values for its required options, softmax attention for ``sdpa``, or a peer.

    It is seeded, on the setting's device and in its dtype.
    """
    torch.manual_seed(0)
    if subject.name in PEERS:
        layer = build_peer(
            subject.name,
            s.dim,
            heads=s.heads,
            length=max_len or s.T,
            causal=is_causal(subject, s),
            options=subject.options,
        )
    else:
        spec = full_spec(subject, s, max_len or s.T)
        layer = build_mixer(spec.pop("name"), s.dim, causal=is_causal(subject, s), **spec)
    return layer.to(s.device, s.torch_dtype)


def full_spec(subject: BenchSubject, s: Setting, max_len: int) -> Spec:
    """Return the mixer's spec with heads, lengths and its other required options filled in."""
    name = ATTENTION if subject.name == SDPA else subject.name
    return {
        "name": name,
        **MIXERS[name].example_options(max_len, heads=s.heads, grid=s.grid),
        **{k: v for k, v in subject.options.items() if k != "causal"},
    }


def draw(*shape: int, seed: int, s: Setting) -> Tensor:
    """Draw standard normal numbers in the setting's dtype, on the CPU so that they are the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(s.device, s.torch_dtype)


def prepare(subject: BenchSubject, s: Setting) -> Prepared:
    """Build the call to be timed. The caller enters ``subject.scope()`` first."""
    return {"op": _op, "layer": _layer, "decode": _decode, "model": _model}[s.level](subject, s)


def op_args(subject: BenchSubject, s: Setting) -> tuple[Mixer, Callable[..., Tensor], tuple, Options]:
    """Return the mixer, its functional form and that form's arguments: noise for tokens, the mixer's own parameters."""
    mixer = build(subject, s)
    form = mixer.facts.functional_form()
    if form is None:
        raise MixerError(f"bench: {subject.name} has no functional form on q, k and v; measure it with --level layer.")
    grid = s.grid if mixer.facts.grid else None
    with torch.no_grad():
        args, options = mixer.functional_args(Inputs(draw(s.batch, s.T, s.dim, seed=1, s=s), grid=grid))
    return mixer, form, _copy_inputs(form, args, s), options


def _copy_inputs(form: Callable[..., Tensor], args: tuple, s: Setting) -> tuple:
    names = [p.name for p in inspect.signature(form).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    pairs = enumerate(zip(names, args, strict=False))
    return tuple(
        draw(*a.shape, seed=10 + i, s=s) if name in GIVEN and isinstance(a, Tensor) else _detach_tree(a)
        for i, (name, a) in pairs
    )


def _detach_tree(value: object) -> object:
    return (
        tuple(_detach_tree(v) for v in value)
        if isinstance(value, tuple)
        else value.detach().clone()
        if isinstance(value, Tensor)
        else value
    )


def _op(subject: BenchSubject, s: Setting) -> Prepared:
    if subject.name in PEERS:
        raise MixerError(f"bench: {subject.name} is a whole layer; measure it with --level layer.")
    if subject.name == SDPA:
        q, k, v = (draw(s.batch, s.T, s.dim, seed=10 + i, s=s) for i in range(3))
        causal = is_causal(subject, s)
        run: Call = partial(fused_attention, q, k, v, s.heads, causal)
        args, mixer = (q, k, v), build(subject, s)
    else:
        mixer, form, args, options = op_args(subject, s)
        run = partial(form, *args, **options)
    leaves = leaves_of(args)
    return Prepared(_with_backward(run, leaves) if s.backward else _forward_only(run), op_work(mixer, leaves, s))


def fused_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool) -> Tensor:
    """Compute torch's scaled_dot_product_attention on (B, T, D), as any caller has to write it."""
    q, k, v = (by_head(a, heads) for a in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


def _forward_only(run: Call) -> Call:
    @torch.no_grad()
    def call() -> object:
        return run()

    return call


def _with_backward(run: Call, leaves: list[Tensor]) -> Call:
    """Return a call that computes forward and the gradients of every leaf, for a fixed gradient of the output."""
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.no_grad():
        g = torch.randn_like(first_of(run()))
    return lambda: torch.autograd.grad(first_of(run()), leaves, g, allow_unused=True)


def first_of(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Return the output of a layer that may return more."""
    return result if isinstance(result, Tensor) else result[0]


def _layer(subject: BenchSubject, s: Setting) -> Prepared:
    layer = build(subject, s).train(s.backward)
    x = draw(s.batch, s.T, s.dim, seed=1, s=s)
    place = {"grid": s.grid} if s.grid and isinstance(layer, Mixer) and layer.facts.grid else {}

    def run() -> object:
        return layer(x, **place)

    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return Prepared(_with_backward(run, leaves) if s.backward else _forward_only(run), layer_work(layer, s))


class _Head(nn.Module):
    """A stand-in for a projection: the first features of its input, repeated where more are needed."""

    def __init__(self, replaced: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Map (.., in_features) to (.., out_features)."""
        width = self.out_features
        return (
            x[..., :width] if width <= x.shape[-1] else x.repeat_interleave(-(-width // x.shape[-1]), -1)[..., :width]
        )


def without_projections(mixer: Mixer) -> Mixer:
    """Replace the mixer's Linear layers by views, in place, so that only the mixing remains."""
    for name, child in mixer.named_children():
        if isinstance(child, nn.Linear) and name.endswith("_proj"):
            setattr(mixer, name, _Head(child))
    return mixer


def _decode(subject: BenchSubject, s: Setting) -> Prepared:
    """Prepare one more token after ``s.T``, from the same state each time, without projections.

    ``sdpa`` has a preallocated cache of keys and values.
    """
    if s.backward:
        raise MixerError("bench: decoding has no backward pass; use --pass forward.")
    token = draw(s.batch, 1, s.dim, seed=2, s=s)
    if subject.name == SDPA:
        keys, values = (draw(s.batch, s.heads, s.T + 1, s.dim // s.heads, seed=i, s=s) for i in (3, 4))
        moved = 2.0 * keys.numel() * keys.element_size()
        return Prepared(
            _forward_only(lambda: _cached_step(token, keys, values)),
            work_of(moved, 0.0, 4.0 * s.batch * s.T * s.dim, False),
        )
    if subject.name in PEERS or not MIXERS[subject.name].facts.streaming or not is_causal(subject, s):
        raise MixerError(
            f"bench: {subject.label} does not decode token by token; `tokenmix list` says which mixers stream."
        )
    layer = build(subject, s, s.T + AHEAD)
    flops = layer.mixing_cost(s.T + 1).flops - layer.mixing_cost(s.T).flops
    mixer = without_projections(layer).eval()
    try:
        state = after_context(mixer, s)
    except (AttributeError, IndexError):  # it reads the weights of its projections itself
        raise MixerError(
            f"bench: {subject.label} cannot be separated from its projections, so one token cannot be timed."
        ) from None
    held = float(sum(a.numel() * a.element_size() for a in leaves_of(tuple(state))))
    return Prepared(
        _forward_only(Stream(mixer, token, state).go_on), work_of(held, 0.0, float(max(flops, 0)) * s.batch / 2, False)
    )


class Stream:
    """A stream after a context, which goes on for ``AHEAD`` tokens and then from the context again.

    A history that grows in place is copied at the first of them only, as in generation.
    """

    def __init__(self, mixer: Mixer, token: Tensor, context: State):
        self.mixer, self.token, self.context = mixer, token, context
        self.state, self.left = context, 0

    def go_on(self) -> Tensor:
        """Process one more token, and return its output."""
        if self.left == 0:
            self.state, self.left = self.context, AHEAD
        y, self.state = self.mixer.extend(self.token, self.state)
        self.left -= 1
        return y


@torch.no_grad()
def after_context(mixer: Mixer, s: Setting) -> State:
    """Compute the state after ``s.T`` tokens of noise, read in chunks."""
    state, begin = mixer.init_state(s.batch, device=s.device, dtype=s.torch_dtype), time.perf_counter()
    for start in range(0, s.T, CHUNK):
        if time.perf_counter() - begin > READING:
            raise MixerError(
                f"bench: reading the first {start:,} of {s.T:,} tokens took over {READING} s; use shorter contexts."
            )
        _, state = mixer.extend(draw(s.batch, min(CHUNK, s.T - start), s.dim, seed=5 + start, s=s), state)
    return state


def _cached_step(token: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    q = by_head(token, keys.shape[1])
    keys[:, :, -1:], values[:, :, -1:] = q, q
    return F.scaled_dot_product_attention(q, keys, values).transpose(1, 2).flatten(2)


def lm_config(subject: BenchSubject, s: Setting) -> LMConfig:
    """Return the language model with this mixer in every layer."""
    return LMConfig(dim=s.dim, max_len=s.T, mixers=(full_spec(subject, s, s.T),), layers=s.layers, vocab=s.vocab)


def _model(subject: BenchSubject, s: Setting) -> Prepared:
    """Prepare training steps (forward, backward, AdamW) of a byte language model, or only its forward pass."""
    if subject.name in PEERS:
        raise MixerError(f"bench: {subject.name} is measured as a layer; use --level layer.")
    torch.manual_seed(0)
    model = LM(lm_config(subject, s)).to(s.device, s.torch_dtype).train(s.backward)
    tokens = torch.randint(s.vocab, (s.batch, s.T + 1), generator=torch.Generator().manual_seed(0)).to(s.device)
    work = model_work(model, s)
    if not s.backward:
        return Prepared(_forward_only(lambda: model(tokens[:, :-1])), work)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Prepared(step, work)


def needed_bytes(subject: BenchSubject, s: Setting, kernel: bool) -> float:
    """Estimate, within a factor of about two, the memory a call needs with its arguments, to avoid running out of it.

    Args:
        kernel: whether the call runs on a fused kernel, which keeps no pairs.
    """
    size, tokens = s.torch_dtype.itemsize, float(s.batch * s.T * s.dim)
    if s.level == "decode":
        return 8 * tokens * size
    pairs = float(s.T) * s.T * s.batch * s.heads
    if subject.name in PEERS:
        return 40 * tokens * size + (PEERS[subject.name].pairs * pairs * 3 * size)
    mixer = _on_meta(subject, s)
    weights = sum(p.numel() for p in mixer.parameters()) * size * (3 if s.backward else 1)
    kept = 0.0 if subject.name == SDPA or kernel else _activations(mixer, s)
    if subject.name == ATTENTION and subject.backend == "eager":
        kept += 3 * pairs * max(size, 4)
    one = kept + 12 * tokens * size + weights
    return s.layers * (one * (1.0 if s.backward else 0.3) + 20 * tokens * size) if s.level == "model" else one


def _activations(mixer: Any, s: Setting) -> float:
    try:
        return float(mixer.mixing_cost(s.T).activations) * s.batch
    except MixerError:
        return 0.0


def _on_meta(subject: BenchSubject, s: Setting) -> Any:
    """Build the mixer, on the meta device where its parameters may be large."""
    spec = full_spec(subject, s, s.T)
    with torch.random.fork_rng(), torch.device("meta" if math.prod((s.T, s.T)) > 2**24 else "cpu"):
        return build_mixer(spec.pop("name"), s.dim, causal=is_causal(subject, s), **spec)
