"""`tokenmix explain`: what a trained text model does with a sentence, as a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from .arguments import check_folder
from .output import progress, say


@dataclass(frozen=True)
class Explain:
    """Show step by step what your own model does with a sentence, as one interactive page.

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

    def run(self) -> int:
        """Let each model read the sentence and write the page."""
        from ..explain.page import write_page
        from ..explain.runs import explain_runs

        check_folder("explain", self.out)
        tell = progress()
        tell(f"explain: {len(self.dirs)} {'run' if len(self.dirs) == 1 else 'runs'}")
        models = explain_runs(self.dirs, self.text)
        written = write_page(models, self.out, self.lang)
        tell("")
        for each in models:
            say(f"{each.name}: {' '.join(f'{each.text} -> {each.written}'.split())}")
        say(written)
        return 0
