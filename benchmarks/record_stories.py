"""Record what a draft model and a head say at every place of stories, for the paced device.

    python benchmarks/record_stories.py     # 1 minute on one core; needs no download

The tiny target of the package goes on from openings of stories, greedily. At each token of its
answers the draft model says what it thinks likely to follow. So does the head, once for each depth:
with the target's states up to the token DEPTH places before, and its own from there on.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from common import load
from heads import TINY, openings
from rich.progress import track

import outrider
from outrider.drafters.heads import load_head
from outrider.drafters.heads.drafter import HeadModel
from outrider.report import provenance

FILE = Path(__file__).parents[1] / "tests" / "engines" / "sglang" / "paced" / "stories.json.gz"
STORIES, TOKENS, DEPTH, LIKELY = 16, 128, 8, 3

Said = tuple[list[int], list[float]]
"""Tokens, and how likely each is."""


def main() -> None:
    """Record and write tests/engines/sglang/paced/stories.json.gz."""
    made = provenance()
    target, draft = (load(str(TINY / name), "float32") for name in ("target", "draft"))
    weights = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    embedding, lm_head = (weight.detach() for weight in weights)
    model = HeadModel(load_head(TINY / "head", embedding, 4, lm_head=lm_head))
    prompts = openings(STORIES)
    asked = {"max_tokens": TOKENS, "ignore_eos": True}
    outputs = outrider.generate(target, prompts, drafter=None, sampling=asked).outputs
    traces = []
    for prompt, output in track([*zip(prompts, outputs, strict=True)], "recording"):
        likely = _likely(_logits(draft, [*prompt, *output[:-1]])[len(prompt) :])
        head = record(model, target, prompt, output)
        traces.append({"prompt": prompt, "output": output, "likely": likely, "head": head})
    found = {"provenance": made, "traces": traces}
    FILE.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))
    print(f"wrote {FILE.name}: {FILE.stat().st_size} bytes")


@torch.inference_mode()
def record(model: HeadModel, target: Any, prompt: list[int], output: list[int]) -> list[list[Said]]:
    """Return what the head says of each output token but the first, by depth."""
    text = [*prompt, *output]
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    read = torch.stack([states[layer][0] for layer in model.head.hidden_layers], 1)
    sequence: Any = model.open(None)  # type: ignore[arg-type]
    sequence.tell(0, model.head.reduce(read))
    found: list[list[Said]] = [[] for _ in text]
    start = len(prompt)
    model.catch_up([(sequence, text[1:start])])  # the first token is no pair
    for root in range(start, len(text) - 1):
        # the target's states are known up to the token before the root
        logits, branch = model.extend([(sequence, [text[root]])]), sequence
        found[root + 1] += _likely(logits)
        for token in text[root + 1 : min(root + DEPTH, len(text) - 1)]:
            branch = model.fork(branch)
            root += 1
            found[root + 1] += _likely(model.extend([(branch, [token])]))
    # deeper ones were found first: the first root that reached a place was the farthest from it
    return [says[::-1] for says in found[start + 1 :]]


@torch.inference_mode()
def _logits(model: Any, text: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([text])).logits[0]
    return logits


def _likely(logits: torch.Tensor) -> list[Said]:
    chances, tokens = logits.float().softmax(-1).topk(LIKELY)
    rounded = [[round(p, 3) for p in ps] for ps in chances.tolist()]
    return [*zip(tokens.tolist(), rounded, strict=True)]


if __name__ == "__main__":
    main()
