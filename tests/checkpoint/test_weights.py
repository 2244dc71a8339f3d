"""Headers of safetensors and indexes: what they say is held against the files."""

from __future__ import annotations

import json

import pytest

from outrider.checkpoint import model_files, read_header
from outrider.errors import Unsupported

GOOD = {
    "a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "BOOL", "shape": [], "data_offsets": [12, 13]},
}


def write(folder, header, data=b"\0" * 13, length=None):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    file = folder / "model.safetensors"
    size = len(text) if length is None else length
    file.write_bytes(size.to_bytes(8, "little") + text + data)
    return file


def test_a_header(tmp_path):
    header = {"__metadata__": {"format": "pt"}} | GOOD
    found = [(t.name, t.shape, t.stored) for t in read_header(write(tmp_path, header))]
    assert found == [("a", (2, 3), 12), ("b", (), 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [2, 4]},
        {"shape": [2, -3]},
        {"shape": [2, 10**30]},
        {"shape": [0, 10**30]},
        {"shape": [2.0, 3]},
        {"shape": [True] * 17},
        {"shape": "ab"},
        {"shape": None},
        {"dtype": "F32"},
        {"dtype": "PICKLE"},
        {"dtype": ["F16"]},
        {"data_offsets": [0, 11]},
        {"data_offsets": [12, 0]},
        {"data_offsets": [1, 13]},
        {"data_offsets": [0]},
        {"data_offsets": [-12, 0]},
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change):
    with pytest.raises(Unsupported, match="the header of model") as refused:
        read_header(write(tmp_path, GOOD | {"a": GOOD["a"] | change}))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 10_000])
def test_lengths_of_the_header_that_are_wrong(tmp_path, length):
    with pytest.raises(Unsupported, match=r"is not a safetensors file|cannot be read"):
        read_header(write(tmp_path, GOOD, length=length))


def test_data_that_are_cut_or_too_long(tmp_path):
    for data in (b"\0" * 12, b"\0" * 14, b""):
        with pytest.raises(Unsupported, match=r"has \d+ bytes instead of \d+"):
            read_header(write(tmp_path, GOOD, data))


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b"null", b"{" * 1000, b'{"a": 1}'])
def test_headers_that_are_none(tmp_path, text):
    with pytest.raises(Unsupported, match="in "):
        read_header(write(tmp_path, text))


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/tmp/x.safetensors", "a/b.safetensors", "..", "", "a.bin", 3, None, []],
)
def test_an_index_names_files_of_its_directory(tmp_path, name):
    index = {"weight_map": {"a": "model-1.safetensors", "b": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Unsupported, match=r"names .* which is no safetensors file in it"):
        model_files(tmp_path)


def test_a_file_that_the_index_names_is_missing_or_a_link_elsewhere(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (file,) = model_files(folder)
    with pytest.raises(Unsupported, match="is missing"):
        read_header(file)
    write(tmp_path, GOOD)
    file.symlink_to(tmp_path / "model.safetensors")
    with pytest.raises(Unsupported, match="is a link to a file elsewhere"):
        read_header(file)
