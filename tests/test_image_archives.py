"""Archives of images as people pack them: a folder around everything, many readers at once, names of other systems."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from image_sets import folder
from tokenmix.lab.data import Bounds, open_images
from tokenmix.lab.data.trees import tar_tree


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("form", ["", "xz", "gz"])
def test_a_tar_of_a_folder_around_everything(tmp_path, form):
    """As `tar cf pets.tar pets` writes it."""
    root, file = folder(tmp_path / "pets"), tmp_path / "pets.tar"
    with tarfile.open(file, f"w:{form}") as tar:
        tar.add(root, "pets")
    assert open_images(str(file)).fingerprint == open_images(str(root)).fingerprint


def test_threads_that_read_one_tar_get_the_files_they_asked_for(tmp_path):
    root, file = folder(tmp_path / "pets", each=150), tmp_path / "pets.tar"
    with tarfile.open(file, "w") as tar:
        tar.add(root, ".")
    tree, switch = tar_tree(file, Bounds()), sys.getswitchinterval()
    wanted = {name: (root / name).read_bytes() for name in tree.names}
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(8):
                got = dict(zip(tree.names, pool.map(tree.bytes, tree.names), strict=True))
                assert [name for name in wanted if got[name] != wanted[name]] == []
    finally:
        sys.setswitchinterval(switch)


def test_a_zip_whose_folders_end_in_backslashes(tmp_path):
    """As the archives of older programs of Windows."""
    root, file = folder(tmp_path / "pets"), tmp_path / "pets.zip"
    with zipfile.ZipFile(file, "w") as z:
        z.writestr("pets\\", b"")
        for path in sorted(root.rglob("*.png")):
            z.write(path, "pets\\" + str(path.relative_to(root)).replace("/", "\\"))
    assert open_images(str(file)).fingerprint == open_images(str(root)).fingerprint
