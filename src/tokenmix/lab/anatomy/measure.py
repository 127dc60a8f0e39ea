"""All measures of one model on one set of images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...errors import MixerError
from ...types import Record
from .images import Images
from .looks import Look, token_looks
from .lost import Found, discover
from .outliers import Outliers, Redundancy, StepNorms, find_outliers, norms_by_step, redundancy
from .probes import ByDepth, Classified, Probes, class_probe, depth_probe, patch_pixels, probe_tokens
from .subject import ProbedModel, Reading, read

FEATURES = ("auto", "keys", "values", "queries", "tokens")
SHOWN = 6


@dataclass(frozen=True)
class Anatomy:
    """What was measured.

    Args:
        probes, classified, by_depth: numbers, or why there are none.
        by_step: step of training -> norms then, of a run with more than one checkpoint; else empty.
        looks: where tokens look in the images that are shown; empty where a grid has one patch.
        how: how the weights behind ``looks`` are known: softmax, values or jacobian.
        objects: found in the images that are shown, in ``features``: "keys", "values", "queries" or "tokens".
    """

    subject: ProbedModel
    images: Images
    reading: Reading
    outliers: Outliers
    redundancy: Redundancy
    probes: Probes | str
    classified: Classified | str
    by_depth: ByDepth | str
    by_step: dict[int, StepNorms]
    looks: list[Look]
    how: str
    objects: list[Found]
    features: str

    @property
    def n_drawn(self) -> int:
        """Return the number of images that are drawn."""
        return len(self.objects)

    def to_json(self) -> Record:
        """Return every number that is no map."""
        last = self.reading.norms.patches[-1].flatten()
        return {
            "model": self.subject.name,
            "kind": self.subject.kind,
            "images": len(self.images.pixels),
            "source": self.images.source,
            "grid": list(self.subject.grid),
            "tokens_before_patches": list(self.subject.prefix),
            "norm_median": float(last.median()),
            "norm_largest": float(last.max()),
            "cutoff": self.outliers.cutoff,
            "rule": self.outliers.rule,
            "outliers": self.outliers.share,
            "above_cutoff_by_layer": self.outliers.by_layer.tolist(),
            "prefix_norms": self.reading.norms.prefix[-1].mean(0).tolist(),
            "similarity": {"outliers": self.redundancy.outliers, "others": self.redundancy.others},
            "probes": self.probes if isinstance(self.probes, str) else _to_plain_dict(self.probes),
            "classified": self.classified if isinstance(self.classified, str) else self.classified._asdict(),
            "by_depth": self.by_depth if isinstance(self.by_depth, str) else self.by_depth._asdict(),
            "by_step": {step: norms._asdict() for step, norms in self.by_step.items()},
            "looks": {
                "weights": self.how,
                "tokens": {each.name: {"smooth": each.smooth, "on_outliers": each.on_outliers} for each in self.looks},
            },
            "objects": {"features": self.features, "boxes": [list(each.box) for each in self.objects]},
        }


def dissect(
    subject: ProbedModel,
    images: Images,
    *,
    cutoff: float | None = None,
    top: float | None = None,
    features: str = "auto",
    k: int | None = None,
    shift: float = 0.0,
    shown: int = SHOWN,
    seed: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> Anatomy:
    """Let a ViT read images and measure its tokens.

    Args:
        cutoff, top: which patches are outliers; see ``find_outliers``.
        features: in which objects are looked for: "keys", "values" or "queries" of the last layer, "tokens" of the
            output, or "auto": keys, and tokens where the last layer has no key for each token.
        k, shift: see ``discover``.
        shown: images that are drawn.
        seed: of the halves that are fitted and scored, and of random tokens.
        tell: called with a line before each part.
    """
    if features not in FEATURES:
        raise MixerError(f"look tokens: --features is one of {', '.join(FEATURES)}, got {features!r}.")
    if shown < 1:
        raise MixerError(f"look tokens: --shown must be at least 1, got {shown}.")
    tell(f"look tokens: reading {len(images.pixels)} images")
    seen = read(subject, images.pixels, shown)
    chosen, used = _features(subject, seen, features)
    found = find_outliers(seen.norms, cutoff=cutoff, top=top)
    marked = found.mask.flatten(1)
    tell("look tokens: probing tokens")
    pixels = patch_pixels(images.pixels, subject.side)
    probes = probe_tokens(seen.patches, pixels, marked, subject.grid, seed=seed)
    classified = class_probe(seen.patches, seen.prefix, subject.prefix, marked, images.labels, seed=seed)
    by_depth = depth_probe(seen.pooled, images.labels, seed=seed)
    by_step = norms_by_step(subject, images.pixels, tell)
    tell("look tokens: attention")
    some = images.pixels[:shown]
    weights, how = subject.attention(some)
    norms = seen.norms.patches[-1]
    looks = token_looks(weights, list(subject.prefix), subject.grid, found.mask[:shown], norms[:shown])
    objects = [discover(each, subject.grid, k=k, shift=shift) for each in chosen[:shown]]
    alike = redundancy(seen.similarity, found.mask)
    parts = probes, classified, by_depth, by_step
    return Anatomy(subject, images, seen, found, alike, *parts, looks, how, objects, used)


def _features(subject: ProbedModel, seen: Reading, wanted: str) -> tuple[Tensor, str]:
    """Return features (B, H W, d) to look for objects in, and what they are."""
    named = {**seen.features._asdict(), "tokens": seen.patches}
    if wanted == "auto":
        wanted = "tokens" if named["keys"] is None else "keys"
    if named[wanted] is None:
        have = ", ".join(name for name, value in named.items() if value is not None)
        raise MixerError(
            f"look tokens: the last layer of {subject.name} has no {wanted} for each token; it has {have}."
        )
    return named[wanted], wanted


def _to_plain_dict(probes: Probes) -> Record:
    return {name: value._asdict() if hasattr(value, "_asdict") else value for name, value in probes._asdict().items()}
