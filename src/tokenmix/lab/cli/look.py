"""The verb look: show how a trained model processes a sentence or images."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from ...errors import MixerError
from .arguments import check_folder
from .output import progress, say, say_json


@dataclass(frozen=True)
class LookSentence:
    """Show step by step how your own model processes a sentence, as one interactive page.

    Tokens, embeddings, positions, queries, keys and values, products, masks, weights, heads and sums, with the numbers
    of the model. Several runs are shown side by side. A run is that of an encoder-decoder, which translates the
    sentence, of a language model, which predicts each next token, or of a text encoder.
    """

    dirs: Positional[Annotated[list[Path], arg(metavar="RUN [RUN ...]")]]
    """Run directories of text models, all of one kind."""

    text: str
    """Sentence to read, such as "The ball is blue"."""

    lang: Literal["en", "zh"] = "en"
    """Language in which the page opens: en or zh. A button on it switches."""

    out: Path = Path("explain.html")
    """HTML file to write."""

    instead_of_data = "it shows one sentence, which --text gives"

    def run(self) -> int:
        """Let each model read the sentence and write the page."""
        from ..explain.explain_page import write_page
        from ..explain.runs import explain_runs

        check_folder("look sentence", self.out)
        tell = progress()
        tell(f"look sentence: {len(self.dirs)} {'run' if len(self.dirs) == 1 else 'runs'}")
        models = explain_runs(self.dirs, self.text)
        written = write_page(models, self.out, self.lang)
        tell("")
        for each in models:
            say(f"{each.name}: {' '.join(f'{each.text} -> {each.written}'.split())}")
        say(written)
        return 0


@dataclass(frozen=True)
class LookTokens:
    """Measure the tokens of a Vision Transformer as in "Vision Transformers Need Registers", and write a page.

    Norms and outliers, similarity of patches with their neighbours, linear probes for position, pixels and class,
    attention of [CLS] and registers, and objects found without labels. Only the class needs labels.
    """

    model: Positional[Annotated[str, arg(metavar="MODEL")]]
    """Run directory of a ViT with any mixer, folder of transformers (ViT, DINOv2 ...) or of timm, or timm:NAME."""

    images: Positional[Annotated[list[str], arg(metavar="IMAGES")]]
    """Image files, a folder of them, or a labelled set: digits, cifar10 ..., an .npz, or a folder of class folders."""

    out: Path = Path("anatomy.html")
    """HTML file to write."""

    instead_of_data = "what other verbs take as --data stands here after the model: look tokens RUN digits"

    split: Literal["train", "valid", "test"] = "test"
    """Split of a labelled set."""

    limit: int = 512
    """Maximum number of images to read."""

    shown: int = 6
    """Images to draw."""

    cutoff: float | None = None
    """Norm above which a patch is an outlier. Default: the upper quartile plus three times the interquartile range."""

    top: float | None = None
    """Compare this percentage of the patches, those with the largest norms, in place of outliers."""

    features: Literal["auto", "keys", "values", "queries", "tokens"] = "auto"
    """Features for the object search. auto: keys of the last layer, or tokens of the output if it has no keys."""

    shift: float = 0.0
    """Constant added to the products of features before their signs are read."""

    weights: str | None = None
    """For timm:NAME: checkpoint file to load, or random. Default: the weights that timm has or downloads."""

    image_size: int | None = None
    """Side of the images in pixels, if the model supports several sizes. Default: the size of its training."""

    seed: int = 0
    """Seed of the split into fitted and scored halves, and of random tokens."""

    json: bool = False
    """Print the numbers as JSON."""

    def run(self) -> int:
        """Measure the model and write the page."""
        from ..anatomy.anatomy_page import summary, write_page
        from ..anatomy.images import load_images
        from ..anatomy.loading import open_subject
        from ..anatomy.measure import dissect
        from ..report.figures import check_drawing
        from ..train.config import check_seed

        check_seed(self.seed, "look tokens: seed")
        check_folder("look tokens", self.out)
        check_drawing()
        subject = open_subject(self.model, weights=self.weights, image_size=self.image_size)
        images = load_images(self.images, subject, split=self.split, limit=self.limit)
        tell = progress()
        try:
            found = dissect(
                subject,
                images,
                cutoff=self.cutoff,
                top=self.top,
                features=self.features,
                shift=self.shift,
                shown=self.shown,
                seed=self.seed,
                tell=tell,
            )
            written = write_page(found, self.out, tell)
        finally:
            tell("")
        if self.json:
            say_json({**found.to_json(), "page": str(written)})
        else:
            say(summary(found))
            say(written)
        return 0


@dataclass(frozen=True)
class LookImages:
    """Draw attention and other maps of a vision model for given images, as PNG files.

    The pictures show filters, keys, attention by offset, focus, memories and token norms; for a masked autoencoder also
    its reconstruction of masked patches.
    """

    dir: Positional[Annotated[Path, arg(metavar="MODEL")]]
    """Run directory, or a folder written by `tokenmix convert`."""

    images: Positional[Annotated[list[Path], arg(metavar="IMAGE [IMAGE ...]")]]
    """Image files; each is cropped and resized to the model's image size."""

    out: Path
    """Folder to write the pictures to."""

    instead_of_data = "it draws single images, whose files stand after the model"

    dark: bool = False
    """Draw on a dark background."""

    json: bool = False
    """Print the paths of the pictures as JSON."""

    def run(self) -> int:
        """Draw the pictures and print their paths."""
        from ..report import draw_pictures
        from ..report.figures import check_drawing
        from ..report.maps import check_vit
        from ..train import load_model
        from ..train.rundir import RunDir

        if not self.images:
            raise MixerError("look images: give at least one image file.")
        check_drawing("look images")
        model, _ = load_model(self.dir)
        check_vit(model, "look images")
        data: object = RunDir.open(self.dir).config().data if (self.dir / "checkpoints").is_dir() else None
        mean, std = getattr(data, "mean", None), getattr(data, "std", None)
        written = draw_pictures(
            model, self.images, self.out, mean=mean, std=std, theme="dark" if self.dark else "light"
        )
        paths = [str(p) for p in written]
        say(json.dumps(paths) if self.json else "\n".join(paths))
        return 0


LOOKS: dict[str, type] = {"sentence": LookSentence, "tokens": LookTokens, "images": LookImages}


@dataclass(frozen=True)
class Look:
    """Show how a trained model processes a sentence, what the tokens of a ViT hold, or what it attends to in images."""

    kind: Annotated[
        Annotated[LookSentence, subcommand("sentence")]
        | Annotated[LookTokens, subcommand("tokens")]
        | Annotated[LookImages, subcommand("images")],
        arg(name=""),
    ]
    """Subject: sentence, tokens or images."""

    def run(self) -> int:
        """Run the chosen view."""
        return self.kind.run()
