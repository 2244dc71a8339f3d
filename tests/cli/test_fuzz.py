"""benchmarks/fuzz.py, and the watch over the inputs of tests/doors."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "doors"))

import fuzz
import watch


def test_a_slow_input_fails_even_if_the_door_catches_everything():
    def waiting():
        with suppress(Exception):
            time.sleep(60)

    def working():
        with suppress(Exception):
            while True:
                pass

    for slow, limits in ((waiting, (60, 0.05)), (working, (0.05, 60))):
        watched = watch.Watch(*limits)
        watched.over(int)()  # the first may take longer
        with pytest.raises(pytest.fail.Exception, match="the input takes over"):
            watched.over(slow)()
        assert (watched.inputs, watched.hangs) == (2, 1)


def test_a_pause_is_not_counted():
    watched = watch.Watch(wait=0.2)

    def restarting():
        with watched.pause():
            time.sleep(0.4)

    watched.over(int)()
    watched.over(restarting)()
    assert not watched.hangs


def test_a_heavy_input_fails_though_it_gives_its_memory_back(monkeypatch):
    monkeypatch.setattr(watch, "MEGABYTES", 100)
    watched = watch.Watch(300, 300)
    watched.over(lambda: len(bytes(10)))()
    with pytest.raises(pytest.fail.Exception, match="MB"):
        watched.over(lambda: len(b"x" * 2**28))()
    assert (watched.inputs, watched.heavy) == (2, 1)


def test_each_door_is_a_module():
    found = fuzz.doors()
    assert {"profiles", "request_options", "sglang_requests"} <= found.keys()
    # with the names that tests have for one module
    assert fuzz.SHARES.keys() >= found.keys()


def test_a_run_goes_on_where_it_was(tmp_path):
    asked = ["--door", "request_options", "--inputs", "1", "--out", str(tmp_path / "fuzz.json")]
    fuzz.main(asked)
    first = json.loads((tmp_path / "fuzz.json").read_text())
    assert first["inputs"] >= 10
    assert [first[key] for key in ("crashes", "hangs", "heavy")] == [0, 0, 0]
    fuzz.main(asked)
    assert json.loads((tmp_path / "fuzz.json").read_text())["doors"] == first["doors"]


def test_what_breaks_is_counted(tmp_path):
    def part(code):
        file = tmp_path / "broken.py"
        file.write_text(code)
        return fuzz.Part("broken", 0, 1, (sys.executable, str(file)), {})

    dead = fuzz.run(part("raise SystemExit(3)"), budget=30)
    assert (dead["crashes"], dead["hangs"]) == (1, 0)
    assert dead["broken_by"][0]["examples"] == 1
    hung = fuzz.run(part("import time; time.sleep(60)"), budget=1)
    assert (hung["crashes"], hung["hangs"]) == (0, 1)
