"""A file of prompts: text or JSON lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import damaged, encoded, refusal, texts, written

from outrider.audit.prompts import read_prompts
from outrider.errors import UsageError

ASKED = ({"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("prompts")


def read(path, content: bytes) -> None:
    path.write_bytes(content)
    with refusal(UsageError):
        found = read_prompts(path)
        assert found
        for prompt in found:
            assert prompt.encode()  # it can be sent


LINES = st.lists(written(*ASKED), min_size=1, max_size=3).map("\n".join).map(encoded)


@given(LINES | LINES.flatmap(damaged))
def test_json_lines(folder, content):
    read(folder / "prompts.jsonl", content)


@given(texts().map(encoded) | LINES)
def test_lines(folder, content):
    read(folder / "prompts.txt", content)
