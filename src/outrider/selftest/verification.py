"""The kernels that sample and verify, against plain torch: the same coins, the same integers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.selftest.check import Check, Setting, equal, near

__all__ = ["renorm_prob", "sample_match", "tree_sampling"]

SAMPLINGS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
]
LIMITS: dict[str, Tensor] = {
    "top_k": torch.tensor([1, 2, 40, 2**30], dtype=torch.int32),
    "top_p": torch.tensor([0.0, 0.5, 0.95, 1.0]),
}
TREE = (-1, 0, 0, 0, 1, 2, 2, 6)


def _vocabularies(setting: Setting) -> tuple[int, ...]:
    """Return the sizes to try: one smaller than a tile, one of several tiles, a real one."""
    if setting.interpreted:
        return (7, 1000) if setting.quick else (7, 1000, 5000)
    return (7, 151_936) if setting.quick else (7, 1000, 32_000, 151_936)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers from a normal distribution, on the host."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sample_match(setting: Setting) -> Iterator[Check]:
    """Yield the checks of sampling with several parameters, and of matching."""
    from outrider.kernels.sample_match import reference, triton

    def sample(vocab: int, dtype: torch.dtype) -> str:
        full = [
            {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | s for s in SAMPLINGS * 3
        ]
        columns = [torch.tensor([row[name] for row in full]) for name in full[0]]
        columns[1] = columns[1].to(torch.int64)
        generator = torch.Generator().manual_seed(1)
        columns += [torch.randint(0, top, (len(full),), generator=generator)
                    for top in (2**62, 5000)]  # fmt: skip
        logits = (normal(len(full), vocab) * 3).to(dtype)
        expected = reference.sample(logits, *columns)
        given = [x.to(setting.device) for x in (logits, *columns)]
        return f"{equal(triton.sample(*given), expected, 'tokens')} tokens equal"

    def match() -> str:
        generator = torch.Generator().manual_seed(2)
        tokens, drafts = (torch.randint(0, 2, (40,), generator=generator) for _ in range(2))
        trees = torch.tensor([0, 0, 0, 0, 1, 2, 2, 6]), torch.tensor([0, 0, 1, 2, 3, 4, 5, 6])
        given: dict[str, Any] = {
            "tokens": tokens,
            "drafts": drafts,
            "parents": torch.cat([trees[i % 2] for i in range(5)]),
            "rows_start": torch.tensor([0, 8, 16, 24, 32, 40, 40]),
            "max_depth": 5,
        }
        expected = reference.match(**given)
        for name, ours in triton.match(**setting.move(given))._asdict().items():
            equal(ours, getattr(expected, name), name)
        return f"6 requests, {int(expected.num_accepted_drafts.sum())} drafts accepted by both"

    for vocab in _vocabularies(setting):
        for dtype in (torch.float32, torch.bfloat16):
            kind = str(dtype).removeprefix("torch.")
            name = f"sample_match: {len(SAMPLINGS)} samplings, V = {vocab}, {kind}"
            yield Check(name, "correctness", partial(sample, vocab, dtype))
    yield Check("sample_match: match of chains and trees", "correctness", match)


def renorm_prob(setting: Setting) -> Iterator[Check]:
    """Yield the checks of top-k and top-p."""
    from outrider.kernels.renorm_prob import reference, triton

    def run(kind: str, vocab: int) -> str:
        limits = LIMITS[kind]
        probs = (normal(len(limits), vocab, seed=5) * 3).softmax(-1)
        expected = getattr(reference, f"{kind}_renorm_prob")(probs, limits)
        ours = getattr(triton, f"{kind}_renorm_prob")(
            probs.to(setting.device), limits.to(setting.device)
        ).cpu()
        equal(ours > 0, expected > 0, "kept tokens")
        kept = expected > 0
        # a division and the sum of a row, each lane's part of it rounded once a tile
        worst = near(ours[kept], expected[kept].double(), expected[kept] * 2.0**-19, "weights")
        return f"{int(kept.sum())} tokens kept by both, weights within {worst:.2f} of 2^-19"

    for vocab in _vocabularies(setting):
        for kind in LIMITS:
            yield Check(f"renorm_prob: {kind}, V = {vocab}", "correctness",
                        partial(run, kind, vocab))  # fmt: skip


def tree_sampling(setting: Setting) -> Iterator[Check]:
    """Yield the checks of SGLang's rule for trees."""
    from outrider.kernels.tree_sampling import reference, triton

    def run(vocab: int) -> str:
        given = _tree_problem(vocab)
        moved = setting.move(given)
        reference.tree_speculative_sampling_target_only(**given)
        triton.tree_speculative_sampling_target_only(**moved)
        for name in ("predicts", "accept_index", "accept_token_num", "draft_probs"):
            equal(moved[name], given[name], name)
        return f"6 trees, {int(given['accept_token_num'].sum())} drafts accepted by both"

    for vocab in _vocabularies(setting):
        yield Check(f"tree_sampling: V = {vocab}", "correctness", partial(run, vocab))


def _tree_problem(vocab: int, batch: int = 6) -> dict[str, Any]:
    size, generator = len(TREE), torch.Generator().manual_seed(6)
    target = (normal(batch, size, vocab, seed=7) * 4).softmax(-1)
    child, sibling = [-1] * size, [-1] * size
    for node in reversed(range(1, size)):
        sibling[node], child[TREE[node]] = child[TREE[node]], node
    candidates = torch.zeros(batch, size, dtype=torch.int64)
    for parent in set(TREE[1:]):
        nodes = [node for node in range(size) if TREE[node] == parent]
        p = target[:, parent] + 1e-9  # siblings differ: drawn without replacement
        candidates[:, nodes] = torch.multinomial(p, len(nodes), generator=generator)
    return {
        "predicts": torch.full((batch * size,), -1, dtype=torch.int32),
        "accept_index": torch.full((batch, 4), -1, dtype=torch.int32),
        "accept_token_num": torch.full((batch,), -1, dtype=torch.int32),
        "candidates": candidates,
        "retrive_index": torch.arange(batch * size).view(batch, size),
        "retrive_next_token": torch.tensor([child] * batch),
        "retrive_next_sibling": torch.tensor([sibling] * batch),
        "uniform_samples": torch.rand(batch, size, generator=generator),
        "uniform_samples_for_final_sampling": torch.rand(batch, generator=generator),
        "target_probs": target,
        "draft_probs": torch.zeros_like(target),
    }
