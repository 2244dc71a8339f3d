"""Files of a checkpoint: links, sizes and JSON."""

from __future__ import annotations

import json
import os

import pytest

from outrider.checkpoint import check_files, read_json
from outrider.errors import Unsupported


def refused(folder, said):
    with pytest.raises(Unsupported, match=said) as error:
        check_files(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "not an object"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": 1, "a": 2}', "a key stands there twice"),
        ('{"a": {"b": 1, "b": 2}}', "a key stands there twice"),
        ('{"a": %s}' % ("9" * 41), "a number of 41 digits"),
        ('{"a": %s}' % ("[" * 100 + "]" * 100), "nested too deeply"),
        ('{"a": %s}' % ("[" * 200_000 + "]" * 200_000), "nested too deeply"),
        ('{"a": [' + "[]," * 2_000_001, "too many values"),
        ("{", "cannot be read"),
        ("", "cannot be read"),
        (" " * ((8 << 20) + 1), "more than 8,388,608 bytes"),
    ],
    ids=lambda text: text[:24].strip(),
)
def test_json_that_is_refused(tmp_path, text, said):
    (tmp_path / "config.json").write_text(text)
    refused(tmp_path, said)


def test_json_that_is_common(tmp_path):
    """State-space models have an infinite limit, tokenizers a length of 31 digits."""
    text = '{"time_step_limit": [0.0, Infinity], "model_max_length": %s}' % (10**30)
    (tmp_path / "config.json").write_text(text)
    assert read_json(tmp_path, "config.json")["model_max_length"] == 10**30


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    refused(tmp_path, "cannot be read")


@pytest.fixture
def snapshot(tmp_path):
    """Return a model's snapshot in a cache of the Hugging Face hub, links to blobs."""
    folder = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    blobs = folder.parents[1] / "blobs"
    blobs.mkdir()
    (blobs / "abc").write_text('{"a": 1}')
    (folder / "config.json").symlink_to("../../blobs/abc")
    return folder


def test_the_cache_of_the_hub_is_made_of_links(snapshot, tmp_path):
    check_files(snapshot)
    (tmp_path / "latest").symlink_to(snapshot)
    check_files(tmp_path / "latest")
    assert read_json(tmp_path / "latest", "config.json") == {"a": 1}


def test_blobs_that_are_a_link(snapshot, tmp_path):
    blobs = snapshot.parents[1] / "blobs"
    blobs.rename(tmp_path / "shared")
    blobs.symlink_to(tmp_path / "shared")
    check_files(snapshot)


def test_links_elsewhere(tmp_path):
    folder, other = tmp_path / "model", tmp_path / "secret.json"
    folder.mkdir()
    other.write_text('{"a": 1}')
    for name in ("config.json", "chat_template.jinja", "model.safetensors"):
        (folder / name).symlink_to(other)
        refused(folder, f"{name} in .* is a link to a file elsewhere")
        (folder / name).unlink()
    (folder / "additional_chat_templates").symlink_to(tmp_path)
    refused(folder, "is a link elsewhere")


def test_a_link_within_the_directory(tmp_path):
    (tmp_path / "own.json").write_text("{}")
    (tmp_path / "config.json").symlink_to("own.json")
    check_files(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_pipes_and_devices_are_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    refused(tmp_path, f"{name} in .* is not a regular file")
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    refused(tmp_path, f"{name} in .* is a link to a file elsewhere")


@pytest.mark.parametrize("key", ["tokenizer_file", "vocab_file", "merges_file"])
def test_a_tokenizer_that_names_files_elsewhere(tmp_path, key):
    """Transformers 4.57 opens them."""
    folder, other = tmp_path / "model", tmp_path / "other.json"
    folder.mkdir()
    other.write_text("{}")
    file = folder / "tokenizer_config.json"
    for value in (str(other), os.path.relpath(other)):
        file.write_text(json.dumps({key: value}))
        refused(folder, f"names a {key} elsewhere")
    file.write_text(json.dumps({"sp_model_kwargs": {key: str(other)}}))
    refused(folder, f"names a {key} elsewhere")
    # paths of the machine where it was made are common
    for value in ("/admin/home/someone/other.json", None, "vocab.json", str(folder / "a.json")):
        file.write_text(json.dumps({key: value}))
        check_files(folder)
