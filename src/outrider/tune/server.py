"""A server to try on: `outrider serve` with every drafter allowed, on a port of its own."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from outrider.clients import process

__all__ = ["serving"]

COUNTS = ("--speculative-num-steps", "--speculative-num-draft-tokens")


@contextmanager
def serving(
    flags: Sequence[str], most_drafts: int, draft_bits: int | None, log: Path
) -> Iterator[str]:
    """Start a server with SGLang's own flags, yield its address, and end it.

    log: where its output goes
    """
    has_draft = "--speculative-draft-model-path" in " ".join(flags)
    names = ["suffix", "ngram", "adaptive", *(["model"] if has_draft else [])]
    content: dict[str, object] = {"drafters": {name: {} for name in names}}
    # where SGLang's flags say how many, a profile that says more would be refused
    if not any(flag.startswith(COUNTS) for flag in flags):
        content["max_drafts"] = most_drafts
    if draft_bits is not None and has_draft:
        content["draft_bits"] = draft_bits
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.yaml"
        profile.write_text(yaml.safe_dump(content))
        command = [sys.executable, "-m", "outrider", "serve", "--profile", str(profile), *flags]
        with process.serving(command, log) as url:
            yield url
