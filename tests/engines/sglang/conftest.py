"""Servers for the tests, and a draft model that is right now and then."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
if (HERE / "site") not in map(Path, sys.path):
    sys.path.append(str(HERE / "site"))


LONGEST = [
    *("test_selftest_server.py", "test_parity.py", "test_parallel.py", "test_soak.py"),
    *("test_heads.py", "test_faults.py", "test_coverage.py", "test_quickstart.py"),
]
"""These files begin: two processes then end at about the same time."""

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
collect_ignore_glob = [] if HAS_SGLANG else ["test_*.py"]


def pytest_report_header():
    """Say that, and why, these tests are left out."""
    if not HAS_SGLANG:
        return "tests/engines/sglang: left out, no SGLang here (scripts/setup-sglang-cpu makes one)"
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def forks(logs):
    """What servers of tests are forked from."""
    from forkserver import ForkServers

    servers = ForkServers(logs)
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def launch(logs, forks):
    """Return a function that starts a server: it answers after `wait`, or as a context.

    It is forked, unless `plain` asks for a start as users do it, with new interpreters.
    It ends with the file that started it: even an idle one takes time from the others.
    """
    from server import Server

    started = []

    def start(name: str, model: Path, *flags: str, plain=False, **environment: str) -> Server:
        by = None if plain else forks
        server = Server(model, *flags, log=logs / f"{name}.log", forks=by, **environment)
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def deterministic(launch, tmp_path_factory):
    """Return a function that returns bare SGLang in its deterministic mode, for `parity.ask_bare`.

    Its answers are shared by all tests of a run, and by both processes that run them: it starts
    only if it is asked for what no test has asked yet.
    """
    import parity
    import sglang

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "deterministic"

    def bare(name: str, model: Path, *flags: str, **environment: str) -> parity.KnownAnswers:
        flags = (*parity.BARE, *parity.DETERMINISTIC, *flags)
        key = [sglang.__version__, str(model), *flags, environment]
        start = lambda: launch(f"{name}-bare", model, *flags, **environment).wait()  # noqa: E731
        return parity.KnownAnswers(start, key, folder)

    return bare


@pytest.fixture(scope="session")
def noisy(tmp_path_factory):
    """Return a function that makes a draft model of a model: its weights with some noise."""
    import parity

    def make(model: Path, noise: float = 0.1) -> Path:
        return parity.noisy(model, tmp_path_factory.mktemp("draft") / f"{model.name}-noisy", noise)

    return make


@pytest.fixture(scope="session")
def profile(tmp_path_factory):
    """Return a function that writes a profile and returns the environment that names it.

    Tests that count drafts name a fixed drafter: the default may find that none pay here. Servers
    check each KV slot that they read, unless `sanitize` says otherwise.
    """

    def write(**content) -> dict[str, str]:
        path = tmp_path_factory.mktemp("profile") / "profile.yaml"
        path.write_text(json.dumps({"sanitize": True} | content))
        return {"OUTRIDER_CONFIG": str(path)}

    return write
