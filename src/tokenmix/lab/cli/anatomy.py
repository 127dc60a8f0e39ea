"""`tokenmix anatomy`: what the tokens of a Vision Transformer hold, as a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from .arguments import check_folder
from .output import progress, say, say_json


@dataclass(frozen=True)
class AnatomyOf:
    """Measure the tokens of a Vision Transformer as in "Vision Transformers Need Registers", and write a page.

    Norms and outliers, similarity of patches with their neighbours, linear probes for position, pixels and class, where
    [CLS] and registers look, and objects found without labels. Labels are needed for the class alone.
    """

    model: Positional[Annotated[str, arg(metavar="MODEL")]]
    """Run directory of a ViT with any mixer, folder of transformers (ViT, DINOv2 ...) or of timm, or timm:NAME."""

    images: Positional[Annotated[list[str], arg(metavar="IMAGES")]]
    """Image files, a folder of them, or a labelled set: digits, cifar10 ..., an .npz, or a folder of class folders."""

    out: Path = Path("anatomy.html")
    """HTML file to write."""

    split: Literal["train", "valid", "test"] = "test"
    """Split of a labelled set."""

    limit: int = 512
    """Most images to read."""

    shown: int = 6
    """Images to draw."""

    cutoff: float | None = None
    """Norm above which a patch is an outlier. Default: the upper quartile plus three times the interquartile range."""

    top: float | None = None
    """Compare this percentage of the patches, those with the largest norms, in place of outliers."""

    features: Literal["auto", "keys", "values", "queries", "tokens"] = "auto"
    """What objects are looked for in. auto: keys of the last layer, or tokens of the output where there are none."""

    shift: float = 0.0
    """Constant added to the products of features before their signs are read."""

    weights: str | None = None
    """For timm:NAME: checkpoint file to load, or random. Default: the weights that timm has or downloads."""

    image_size: int | None = None
    """Side of the images in pixels, where the model takes other sizes than its own. Default: its own."""

    seed: int = 0
    """Seed of the halves that are fitted and scored, and of random tokens."""

    json: bool = False
    """Print the numbers as JSON."""

    def run(self) -> int:
        """Measure the model and write the page."""
        from ..anatomy.images import load_images
        from ..anatomy.loading import open_subject
        from ..anatomy.measure import dissect
        from ..anatomy.page import summary, write_page
        from ..report.figures import check_drawing
        from ..train.config import check_seed

        check_seed(self.seed, "anatomy: seed")
        check_folder("anatomy", self.out)
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
