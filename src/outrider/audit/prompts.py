"""What is asked: prompts from a file, and those whose answers are spread."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.errors import UsageError

__all__ = ["SAMPLING_PROMPTS", "read_prompts"]

SAMPLING_PROMPTS = (
    "Continue this list of coin flips with ten more, separated by spaces: heads tails tails heads "
    "tails heads heads tails tails heads",
    "Roll a die ten times. Write the numbers, separated by commas, and nothing else.",
    "Write the first sentence of a story about an animal.",
    "Name five colours that go well together, separated by commas.",
)
"""Many answers are likely to each. The first two repeat themselves, so that n-grams draft too."""


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: JSON lines, or a text with one in each line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read ({error})", fix="give a text file with one prompt in each line"
        ) from error
    numbered = [(n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UsageError(f"{path} has no prompts", fix="write one in each line")
    if path.suffix != ".jsonl":
        return [line.strip() for _, line in numbered]
    return [_prompt(line, f"{path}, line {n}") for n, line in numbered]


def _prompt(line: str, where: str) -> str:
    fix = 'write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON ({error})", fix=fix) from error
    prompt = found.get("prompt") if isinstance(found, dict) else None
    if isinstance(found, dict) and "messages" in found:
        messages = found["messages"]
        if not isinstance(messages, list) or len(messages) != 1:
            raise UsageError(
                f"{where}: a conversation of several messages", fix="keep a single user message"
            )
        message = messages[0] if isinstance(messages[0], dict) else {}
        if message.get("role") != "user":
            raise UsageError(
                f"{where}: a message of {message.get('role')!r}", fix="keep a single user message"
            )
        prompt = message.get("content")
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(f"{where}: no prompt", fix=fix)
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise UsageError(f"{where}: half of a surrogate pair", fix="write characters whole")
    return prompt
