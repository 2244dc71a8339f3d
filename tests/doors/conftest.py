"""How many hostile inputs each door gets, and a watch over each of them.

    OUTRIDER_FUZZ_EXAMPLES=5000 pytest tests/doors/test_profiles.py --hypothesis-seed=7

A door is a module of this folder; its tests are Hypothesis's. Without the variable each test gets
EXAMPLES inputs, the same ones every time. An input fails that takes too long or too much memory,
whatever the test says: see `watch`. With OUTRIDER_FUZZ_REPORT=FILE a line of
JSON is appended for each test, for benchmarks/fuzz.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from watch import Watch

EXAMPLES = 30

WANTED = os.environ.get("OUTRIDER_FUZZ_EXAMPLES")
REPORT = os.environ.get("OUTRIDER_FUZZ_REPORT")

settings.register_profile(
    "doors",
    derandomize=WANTED is None,
    max_examples=int(WANTED or EXAMPLES),
    deadline=None,  # the watch has its own
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate, Phase.shrink),  # to explain it traces: that is slow
)

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "engines" / "sglang"))  # the servers of its tests
HAS_SGLANG = importlib.util.find_spec("sglang") is not None
collect_ignore = [] if HAS_SGLANG else ["test_sglang_requests.py"]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Give the tests of this folder their settings, and others none: they have theirs at import."""
    before = settings.get_current_profile_name()
    settings.load_profile("doors")
    try:
        return (yield)
    finally:
        settings.load_profile(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Watch the inputs of a property test, and count them."""
    handle = getattr(item.obj, "hypothesis", None)
    if handle is None:
        return (yield)
    watch = Watch()
    test, said = handle.inner_test, None
    handle.inner_test = watch.over(test)
    try:
        return (yield)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"[:300]
        raise
    finally:
        handle.inner_test = test
        item.user_properties.append(("hostile inputs", watch.inputs))
        _report(item, watch, said)


def _report(item, watch: Watch, said: str | None) -> None:
    if REPORT is None:
        return
    found = {
        "test": item.name,
        "inputs": watch.inputs,
        "crashes": int(said is not None and not watch.hangs and not watch.heavy),
        "hangs": int(watch.hangs > 0),
        "heavy": int(watch.heavy > 0),
        "said": said,
    }
    with Path(REPORT).open("a") as file:
        file.write(json.dumps(found) + "\n")
