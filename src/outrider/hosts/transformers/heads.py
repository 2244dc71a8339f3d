"""Draft models and heads from a directory, for Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.drafters.heads import HeadDrafter, kind_of, load_head, read_config


@dataclass(frozen=True)
class HeadFile:
    """A head on disk. It is loaded for the target that it drafts for, whose embedding it shares."""

    path: Path
    kind: str
    dtype: torch.dtype | None = None

    def drafter(self, model: PreTrainedModel, vocab_size: int, **options: Any) -> HeadDrafter:
        """Return a drafter with this head, for the target. options: of `HeadDrafter`"""
        embedding = model.get_input_embeddings().weight
        layers = int(model.config.get_text_config().num_hidden_layers)
        head = load_head(self.path, embedding.detach(), layers, self.dtype)
        return HeadDrafter(head, vocab_size, **options)


def load_drafter(path: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel | HeadFile:
    """Return what drafts, from a directory: pass it to `generate` as `drafter`.

    Its config.json says what it is: a causal language model, or an EAGLE-3 head in the format of
    SpecForge and SGLang or of speculators.

    path: the directory
    dtype: of its weights; by default that of a model's config.json, and of a head's target
    """
    folder = Path(path)
    kind = kind_of(read_config(folder))
    if kind != "model":
        return HeadFile(folder, kind, dtype)
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    return found.eval()
