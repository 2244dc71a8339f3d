"""Audits of engines without a model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

PROMPTS = [f"prompt {n}" for n in range(12)]


@pytest.fixture
def engines(monkeypatch):
    """Return the engines that names open: fill it."""

    known = {}
    for place in ("outrider.audit.run", "outrider.clients.names"):
        monkeypatch.setattr(f"{place}.open_engine", lambda name: known[name])
    return known


@pytest.fixture
def audit(engines):
    """Return a function that audits a toy engine against a plain one."""
    from toy import Toy

    from outrider.audit.result import Settings
    from outrider.audit.run import audit

    def make(speculative, plain=None, **settings):
        engines["plain"], engines["speculative"] = plain or Toy(drafts=False), speculative
        wanted = Settings(**{"max_tokens": 40, "samples": 0, **settings})
        return audit(("plain", "speculative"), PROMPTS, ["pick", "choose", "name"], wanted)

    return make
