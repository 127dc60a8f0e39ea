"""Files of points and meshes as other programs write them: names of columns, marks of encodings, counts that lie."""

from __future__ import annotations

import struct

import pytest
import torch

from test_point_files import CORNERS, off, read
from tokenmix import MixerError

HEAD = "ply\nformat {} 1.0\nelement vertex {}\nproperty float x\nproperty float y\nproperty float z\n"
LIST = "element face {}\nproperty list uchar int vertex_indices\n"


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    [
        ("plain.csv", "x,y,z\n1,2,3\n4,5,6\n", 3),
        ("quoted.csv", '"X", "Y", "Z"\n1, 2, 3\n4, 5, 6\n', 3),
        ("index.csv", ",x,y,z\n0,1,2,3\n1,4,5,6\n", 3),
        ("order.csv", "label,z,y,x\n7,3,2,1\n8,6,5,4\n", 4),
        ("words.txt", "# made by hand\nx y z label\n1 2 3 7\n4 5 6 8\n", 4),
        ("slashes.asc", "//X Y Z R G B\n1 2 3 9 9 9\n4 5 6 9 9 9\n", 6),
        ("mark.csv", "\ufeff1,2,3\n4,5,6\n", 3),
        ("marked_names.csv", "\ufeffx,y,z\r\n1,2,3\r\n4,5,6\r\n", 3),
    ],
)
def test_tables_with_names_of_columns(tmp_path, name, text, columns):
    found = read(tmp_path, name, text)
    assert isinstance(found, torch.Tensor)
    assert found[:, :3].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert found.shape == (2, columns)
    assert columns != 4 or found[:, 3].tolist() == [7, 8]


def test_a_mark_before_the_text_of_an_off_file(tmp_path):
    assert torch.equal(read(tmp_path, "a.off", "\ufeff" + off()).vertices, read(tmp_path, "b.off", off()).vertices)


def test_a_solid_may_be_called_facet(tmp_path):
    corners = "outer loop\nvertex 0 0 0\nvertex 1 0 0\nvertex 0 1 0\nendloop"
    solid = f"solid my facet\nfacet normal 0 0 1\n{corners}\nendfacet\nendsolid my facet\n"
    assert len(read(tmp_path, "a.stl", solid).faces) == 1


MIXED = (
    (HEAD.format("binary_little_endian", 4) + LIST.format(2) + "end_header\n").encode()
    + struct.pack("<12f", *map(float, CORNERS.split()))
    + struct.pack("<B4iB3i", 4, 0, 1, 2, 3, 3, 0, 1, 2)
)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("less.ply", HEAD.format("ascii", 3) + "end_header\n" + CORNERS, "promises 3 lines, and 4 follow"),
        (
            "faces.ply",
            HEAD.format("ascii", 4) + LIST.format(1) + "end_header\n" + CORNERS + "3 0 1 2\n3 0 1 3\n",
            "promises 5 lines, and 6 follow",
        ),
        ("mixed.ply", MIXED, "its faces have different numbers of corners, which are read from a .ply in text only"),
        ("axes.ply", HEAD.format("ascii", 4).replace("x\n", "a\n") + "end_header\n" + CORNERS, "it has no 'x'"),
        (
            "minus.ply",
            HEAD.format("ascii", 4) + LIST.format(1) + "end_header\n" + CORNERS + "3 0 1 -1\n",
            "has a face with vertex -1, but only 4",
        ),
        ("minus.off", off(counts="4 1", faces=["3 0 1 -1"]), "has a face with vertex -1, but only 4"),
        ("ragged.txt", "1 2 3\n4 5\n", r"changed from 3 to 2 at row 2\)\.$"),
    ],
)
def test_files_that_are_not_what_they_say(tmp_path, name, content, words):
    with pytest.raises(MixerError, match=words) as told:
        read(tmp_path, name, content)
    assert "\n" not in str(told.value)
