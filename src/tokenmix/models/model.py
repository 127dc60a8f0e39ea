"""The base of all models: built from one config, saved in folders, shared on the Hugging Face Hub."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..system.config import Json
from ..system.files import read_json, whole_file, write_json
from ..system.memory import in_memory
from ..system.read_shards import is_sharded
from ..system.tensor_files import read_tensors, write_tensors
from ..system.version import __version__
from .card import model_card

M = TypeVar("M", bound="Model")

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
MOST_LAYERS = 2**14  # building more takes hours, or all memory


class Model(nn.Module):
    """A model that its config describes completely.

    It has the methods of ``huggingface_hub.PyTorchModelHubMixin``. Folders need safetensors, the Hub needs
    huggingface_hub; the extra ``hf`` has both.
    """

    config_class: ClassVar[type[Json]]
    """Class of the config that the model is built from."""
    pipeline_tags: ClassVar[tuple[str | None, str | None]] = (None, None)
    """Tasks on the Hub of a model with classes and of one without; None: its list has none that fits."""

    @classmethod
    def from_config(cls: type[M], config: Any) -> M:
        """Build the model that a config describes; one that would not fit is refused with the config's numbers."""
        check_layers(config)
        with in_memory(lambda why: f"{type(config).__name__}: the model does not fit: {why}; {_largest(config)}."):
            return cls(config)

    def save_pretrained(
        self, save_directory: Path | str, *, repo_id: str | None = None, push_to_hub: bool = False, **options: Any
    ) -> str | None:
        """Write config.json, model.safetensors and a model card into a folder; other files there are left alone.

        A card that is there already is kept. Tensors keep their dtypes; of tied tensors one is written.

        Args:
            repo_id: name of the model on the Hub, for its card; None: that of the folder.
            push_to_hub: whether to call ``push_to_hub`` too, with these ``options``.

        Returns:
            What ``push_to_hub`` returns, or None.
        """
        folder, config, tensors = Path(save_directory), self.config, self._saved_tensors()
        assert isinstance(config, Json)
        if (folder / "checkpoints").is_dir():
            raise MixerError(f"{folder} is a run directory, whose config would be lost; give another folder.")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as why:
            raise MixerError(f"{folder} cannot be made ({why.strerror}); give another folder.") from why
        write_tensors(folder / WEIGHTS, tensors)
        write_json(folder / CONFIG, config.to_json())
        name = repo_id or folder.absolute().name
        if not (folder / CARD).exists():
            self._write_card(folder, name)
        return self.push_to_hub(name, **options) if push_to_hub else None

    @classmethod
    def from_pretrained(
        cls: type[M],
        pretrained_model_name_or_path: Path | str,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: Path | str | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
        map_location: torch.device | str = "cpu",
        strict: bool = True,
    ) -> M:
        """Load a model from a folder, or from the Hub, in eval mode and with the dtypes of the file.

        Args:
            pretrained_model_name_or_path: a folder that ``save_pretrained`` or ``tokenmix convert`` wrote, or a model
                of the Hub.
            force_download, token, cache_dir, local_files_only, revision: for a model of the Hub, as of
                ``huggingface_hub.hf_hub_download``.
            map_location: device of the model.
            strict: refuse weights that are missing or left over.

        Raises:
            MixerError: naming the file that is missing, damaged, or of another class of model.
        """
        name = str(pretrained_model_name_or_path)
        if Path(name).is_dir():
            config_file, weights = _find_files(Path(name))
        else:
            with _hub(f"{cls.__name__}.from_pretrained: there is no folder {name!r}, and of the Hub") as hub:
                config_file, weights = (
                    Path(
                        hub.hf_hub_download(
                            name,
                            file,
                            revision=revision,
                            cache_dir=cache_dir,
                            force_download=force_download,
                            token=token,
                            local_files_only=local_files_only,
                        )
                    )
                    for file in (CONFIG, WEIGHTS)
                )
        try:
            device = torch.device(map_location)
        except RuntimeError as why:
            said = str(why).split("\n")[0]
            raise MixerError(f"{cls.__name__}.from_pretrained: map_location={map_location!r}: {said}.") from None
        config = cls._read_config(config_file)
        with torch.random.fork_rng():
            model = cls.from_config(config)
        tensors = read_tensors(weights)
        _take_dtypes(model, tensors)
        load_weights(model, tensors, weights, strict=strict)
        return model.to(device).eval()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Push model using tokenmix.",
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        create_pr: bool | None = None,
        allow_patterns: list[str] | str | None = None,
        ignore_patterns: list[str] | str | None = None,
        delete_patterns: list[str] | str | None = None,
    ) -> str:
        """Write the model to a repository of the Hub, which is made if there is none.

        Args:
            private: whether a new repository is private; None: the default of its owner.
            token: access token; None: the one that ``hf auth login`` saved.
            branch: branch to write to; None: main.
            create_pr: whether to open a pull request instead.
            allow_patterns, ignore_patterns: files to write, and not to write: ``"README.md"`` keeps the card there.
            delete_patterns: files of the repository to delete.

        Returns:
            The URL of the commit.
        """
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            self.save_pretrained(folder, repo_id=repo_id)
            with _hub(f"{type(self).__name__}.push_to_hub: {repo_id!r}") as hub:
                api = hub.HfApi(token=token)
                repo_id = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
                self._write_card(folder, repo_id)  # which names its owner now
                return api.upload_folder(
                    repo_id=repo_id,
                    repo_type="model",
                    folder_path=folder,
                    commit_message=commit_message,
                    revision=branch,
                    create_pr=create_pr,
                    allow_patterns=allow_patterns,
                    ignore_patterns=ignore_patterns,
                    delete_patterns=delete_patterns,
                )

    def _write_card(self, folder: Path, name: str) -> None:
        with whole_file(folder / CARD) as f:
            f.write(model_card(self, name).encode())

    def _saved_tensors(self) -> dict[str, Tensor]:
        """Return the state dict; refuse one that another process could not load into the model of the config."""
        found = self.state_dict()
        for name, value in found.items():
            what = "no tensor, as of a quantised layer; save the model before quantising it"
            if isinstance(value, Tensor):
                what = "sharded over ranks; gather the model first" if is_sharded(value) else ""
                what = "on the meta device, without values; load some first" if value.is_meta else what
            if what:
                raise MixerError(f"{type(self).__name__}.save_pretrained: {name} is {what}.")
        return found

    @classmethod
    def _read_config(cls, file: Path) -> Any:
        """Read the config of this class of models from config.json."""
        given = read_json(file)
        kind, wanted = given.get("kind"), getattr(cls.config_class, "kind", None)
        if "model_type" in given:
            of = f"is of transformers (model_type {given['model_type']!r}), which loads it itself"
            raise MixerError(
                f"{file} {of}; tokenmix.hosts.read_weights and `tokenmix convert` read some of its models."
            )
        if kind != wanted:
            what = f"a model of kind {kind!r}" if kind else "no model of tokenmix"
            raise MixerError(f"{file} describes {what}; {cls.__name__}.from_pretrained loads those of kind {wanted!r}.")
        try:
            return cls.config_class.from_json(given)
        except MixerError as why:
            raise MixerError(f"{file} does not describe a model of tokenmix {__version__}: {why}") from None


def _find_files(folder: Path) -> tuple[Path, Path]:
    """Return the files of config and weights in a folder."""
    if (folder / "checkpoints").is_dir():
        raise MixerError(f"{folder} is a run directory; tokenmix.lab.train.load_model loads it.")
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            both = f"{CONFIG} and {WEIGHTS} as written by save_pretrained or `tokenmix convert`"
            raise MixerError(f"{folder} contains no model: {file} is missing; it must have {both}.")
    return folder / CONFIG, folder / WEIGHTS


@contextmanager
def _hub(what: str) -> Iterator[Any]:
    """Import huggingface_hub for the block; errors of it become one line that begins with ``what``."""
    try:
        import huggingface_hub
    except ImportError:
        raise MixerError(f"{what}: needs huggingface_hub: pip install 'tokenmix[hf]'.") from None
    try:
        yield huggingface_hub
    except (OSError, ValueError) as why:  # those of the Hub, of its network, and of names that it refuses
        raise MixerError(f"{what}: {' '.join(str(why).split())[:300].rstrip('.')}.") from why


def _take_dtypes(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Give each tensor of a model the dtype of its weights, and what has no weights the one that most have."""
    floating = {name: t.dtype for name, t in tensors.items() if t.is_floating_point()}
    for dtype, _ in Counter(floating.values()).most_common(1):
        model.to(dtype)
    for name, own in model.state_dict(keep_vars=True).items():
        if name in floating and own.is_floating_point():
            own.data = own.data.to(floating[name])


def load_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path, *, strict: bool = True) -> None:
    """Load weights into a model, which they must fit exactly, or with ``strict=False`` where the names are equal."""
    try:
        model.load_state_dict(tensors, strict=strict)
    except RuntimeError as why:
        shapes = {name: (tuple(t.shape), tuple(tensors.get(name, t).shape)) for name, t in model.state_dict().items()}
        unlike = [
            f"{name} has the shape {there}, not {here}" for name, (here, there) in shapes.items() if here != there
        ]
        said = unlike[0] if unlike else " ".join(str(why).split())[:300]
        raise MixerError(
            f"{where}: its weights do not fit the model ({said}); "
            + "`tokenmix convert` adapts weights to another model."
        ) from None


def check_layers(config: Any) -> None:
    """Refuse a config of a model of more layers than are ever built."""
    for name in ("layers", "encoder_layers", "decoder_layers", "depths"):
        given = getattr(config, name, None)
        if max(given if isinstance(given, tuple) else (given or 0,)) > MOST_LAYERS:
            raise MixerError(f"{type(config).__name__}: {name} must be at most {MOST_LAYERS}, got {given}.")


def _largest(config: Any) -> str:
    """Say which numbers of a config are the largest."""
    numbers = {f.name: value for f in fields(config) if isinstance(value := getattr(config, f.name), (int, float))}
    largest = sorted(numbers, key=lambda name: -numbers[name])[:3]
    return f"its largest numbers are {', '.join(f'{name}={numbers[name]!r}' for name in largest)}"
