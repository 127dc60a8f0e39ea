"""The official files of the image sets: addresses, sizes and checksums, and their download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...errors import MixerError
from .cache import cache_dir, download_file

TORONTO = "https://www.cs.toronto.edu/~kriz/"
MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"


@dataclass(frozen=True)
class Official:
    """A file with its size in bytes and the MD5 published by its authors or by torchvision."""

    url: str
    size: int
    md5: str

    @property
    def name(self) -> str:
        return self.url.split("/")[-1]


OFFICIAL = {
    "cifar10": [Official(TORONTO + "cifar-10-python.tar.gz", 170_498_071, "c58f30108f718f92721af3b95e74349a")],
    "cifar100": [Official(TORONTO + "cifar-100-python.tar.gz", 169_001_437, "eb9058c3a382ffc7106e4002c42a8d85")],
    "mnist": [
        Official(MNIST + "train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        Official(MNIST + "train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        Official(MNIST + "t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
        Official(MNIST + "t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
    ],
    "fashion_mnist": [
        Official(FASHION + "train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Official(FASHION + "train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        Official(FASHION + "t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
        Official(FASHION + "t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    ],
    "tiny_imagenet": [
        Official("http://cs231n.stanford.edu/tiny-imagenet-200.zip", 248_100_043, "90528d7ca1a48142e341f4ef8d21d0de")
    ],
}


def fetch(name: str, download: bool) -> Path:
    """Return the official file of a set, or the folder of its files, in the user's cache.

    Missing files are downloaded and checked.
    """
    folder = cache_dir() / "downloads" / name
    for official in OFFICIAL[name]:
        file = folder / official.name
        if file.exists():
            continue
        if not download:
            raise MixerError(
                f"images: {name} is not in the cache ({file}); give a local copy (--data PATH), or fetch "
                + f"{official.url}."
            )
        download_file("images", official.url, file, (official.size, official.md5))
    return folder if len(OFFICIAL[name]) > 1 else folder / OFFICIAL[name][0].name
