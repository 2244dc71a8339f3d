"""`outrider demo`: the first thing to try. A real pair of models, explained and compared."""

from __future__ import annotations

from outrider.explain.recording import ExplainOptions
from outrider.explain.run import run as explain


def run(prompt: str, max_tokens: int, max_drafts: int, temperature: float, seed: int) -> None:
    """Explain a generation of the tiny pair, and compare it with plain decoding."""
    explain(
        ExplainOptions(
            prompt,
            max_tokens=max_tokens,
            max_drafts=max_drafts,
            temperature=temperature,
            seed=seed,
            compare=True,
        )
    )
