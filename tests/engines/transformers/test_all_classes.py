"""No class of the causal-LM mapping is silently different: some of them here, all by hand."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from transformers_models import compare, main, summary


@pytest.mark.parametrize("name", ["Phi3For", "PhimoeFor", "DiffLlama", "Gemma3nForCausalLM"])
def test_a_class_is_equal_or_refused(name):
    found = summary(compare([name]))
    assert set(found["counts"]) <= {"equal", "refused"}, found["classes"]
    assert logging.root.manager.disable == logging.NOTSET, "tests after this one read the log"


@pytest.mark.slow
def test_all_classes(monkeypatch):
    """About 15 minutes. The command that records the result file also runs this."""
    monkeypatch.setattr(sys, "argv", ["transformers_models.py", "For", "LM"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
