"""Drafts that the device makes: launched before the last step is known, and the same answers."""

from __future__ import annotations

from pathlib import Path

import parity
import pytest
from outrider_test_site import no_repeat_processor

from outrider.core import Unsupported
from outrider.engines.sglang.arguments.settings import _check_drafters
from outrider.engines.sglang.plugin import installed_hooks
from outrider.serving.profile import Profile

TARGET = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny" / "target"
NEEDS_TEXT = ("repetition", "frequency", "presence", "penalties", "min_new_tokens", "top_k, top_p")
"""Kinds of requests that penalties of some kind belong to: the CPU has to know their text."""
APT = ("plain", "stream", "n", "chat")
"""Forms without logprobs and processors."""


def phases(is_apt, count):
    """Return requests by their path through the sampler: those that it drafts for, or all."""
    made = 4 * count if is_apt else count
    found = parity.seeded_phases("stories260k", made, 40, no_repeat_processor())
    if not is_apt:
        return found
    apt = [
        [w for w in phase if w.form in APT and not any(name in w.kind for name in NEEDS_TEXT)]
        for phase in found
    ]
    return [phase[: count // 3] for phase in apt]


CASES = [(1, "")]
if (
    installed_hooks().version.contract.VERSION != "0.5.11"
):  # whose pages on CPU take the Triton interpreter
    CASES.append((16, "device"))


@pytest.mark.parametrize(("page", "fault"), CASES)
def test_the_answers_are_those_of_bare_sglang(
    launch, deterministic, tmp_path, page, fault, record_property
):
    """Requests of every kind, retraction, clients that hang up: first those that it drafts for.

    After a fault the CPU drafts, and the answers are the same.
    """
    drafters = {"device": {}}
    environment = parity.profile(tmp_path, drafters, max_drafts=5)
    environment |= parity.RETRACTING | {"OUTRIDER_TEST_FAULT": fault}
    bare = deterministic("device", TARGET)
    ours = [*parity.TIGHT, *parity.OUTRIDER, *parity.DETERMINISTIC, "--page-size", str(page)]
    ours = launch(f"device-{page}", TARGET, *ours, **environment)
    with bare, ours:
        for is_apt in (True, False):
            concurrencies = (1, 12, 12) if is_apt else (12,)
            asked = phases(is_apt, 60 if page == 1 else 24)
            found = parity.compare_seeded(bare, ours, asked, concurrencies, drafters)
            found.conclude(0.0)
            record_property("tokens compared", found.tokens)
        counters = ours.metrics()
        assert counters["outrider:device_steps_total"] > 30, counters
        parity.check_traffic(ours)
        assert parity.faults(ours) == ({fault} if fault else set())


def test_one_option_is_checked_beside_the_defaults_of_the_other():
    for options in ({"min_n": 6}, {"max_n": 1}):
        _check_drafters(Profile(drafter="device", drafters={"device": options}), None)
    with pytest.raises(Unsupported, match="min_n <= max_n"):
        _check_drafters(Profile(drafter="device", drafters={"device": {"min_n": 9}}), None)
