"""Recorded results that are read back: of `bench`, and finished parts of `selftest --server`."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import STEERS, damaged, encoded, files, mutated, refusal, written

from outrider.bench.run import run_compare
from outrider.errors import UsageError
from outrider.trial.parts import Parts

RESULT = json.loads(
    (Path(__file__).parents[2] / "benchmarks" / "results" / "bench_sglang.json").read_text()
)
RESULT["cells"] = RESULT["cells"][:3]
WHOLE = json.dumps(RESULT).encode()
# few of the places that are read lie elsewhere
CELLS = mutated(RESULT["cells"]).map(lambda cells: json.dumps({**RESULT, "cells": cells}).encode())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@given(CELLS | files(RESULT), CELLS | st.just(WHOLE), st.booleans())
def test_two_results_are_compared(folder, old, new, as_json):
    paths = [folder / "old.json", folder / "new.json"]
    for path, content in zip(paths, (old, new), strict=True):
        path.write_bytes(content)
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with refusal(UsageError), redirect_stdout(out):
        run_compare(*paths, as_json)
    said = out.buffer.getvalue().decode()
    assert not STEERS & set(map(ord, said))


FOUND = {"answers": {"0": ["text", 3, "stop", []]}, "refused": {}, "speed": []}


@pytest.fixture(scope="module")
def parts(folder):
    parts = Parts(folder / "parts", {"versions": {"a": "1"}}, {"requests": 3})
    parts.put("bare", FOUND)
    return parts, json.loads(parts.path("bare").read_text())


@given(st.data())
def test_a_changed_part_is_not_used(parts, data):
    parts, document = parts
    content = json.dumps(document).encode()
    text = data.draw(damaged(content) | written(document).map(encoded), "part")
    parts.path("bare").write_bytes(text)
    assert parts.get("bare") in (None, FOUND)
