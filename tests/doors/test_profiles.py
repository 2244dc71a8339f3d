"""A server's profile: YAML that may hold more than it seems to."""

from __future__ import annotations

import pytest
from hypothesis import given
from strategies import bombs, damaged, encoded, refusal, yaml_texts

from outrider.errors import Unsupported
from outrider.serving.profile import LONGEST_PROFILE, Profile, _load, load_profile

USUAL = {
    "drafter": "adaptive", "drafters": {"suffix": {"shared_tokens": 10}, "h": {"path": "x"}},
    "max_drafts": 4, "draft_bits": 8, "draft_timeout": 0.5, "report_acceptance": False,
    "flush_tokens": 8, "verify_pass": "rows", "tracing": False,
}  # fmt: skip


def load(path, content: bytes) -> Profile:
    path.write_bytes(content)
    _load.cache_clear()
    return load_profile(str(path))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles") / "profile.yaml"


@given(yaml_texts(USUAL).map(encoded))
def test_a_profile_is_taken_or_refused(path, content):
    with refusal(Unsupported):
        assert isinstance(load(path, content), Profile)


@given(yaml_texts(USUAL).map(encoded).flatmap(damaged))
def test_a_damaged_profile(path, content):
    with refusal(Unsupported):
        assert isinstance(load(path, content), Profile)


@given(bombs())
def test_an_alias_is_refused(path, text):
    with pytest.raises(Unsupported, match="line 2: write the value out"):
        load(path, encoded(text))


def test_a_large_profile_is_refused(path):
    assert load(path, b"tracing: true\n" + b"#" * (LONGEST_PROFILE - 14)).tracing
    with pytest.raises(Unsupported, match="larger than"):
        load(path, b"tracing: true\n" + b"#" * LONGEST_PROFILE)
