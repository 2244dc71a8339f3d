"""Draft models and heads from a directory, for Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.core import Unsupported
from outrider.drafters.heads import (
    DFlashDrafter,
    DFlashHead,
    HeadDrafter,
    kind_of,
    load_head,
    read_config,
)
from outrider.engines.transformers.loading import load_model


@dataclass(frozen=True)
class HeadFile:
    """A head on disk. It is loaded for the target that it drafts for, whose embedding it shares."""

    path: Path
    kind: str
    dtype: torch.dtype | None = None

    def drafter(
        self, model: PreTrainedModel, vocab_size: int, **options: Any
    ) -> HeadDrafter | DFlashDrafter:
        """Return a drafter with this head, for the target.

        options: of `HeadDrafter` and `DFlashDrafter`
        """
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        head = load_head(
            self.path,
            embedding.weight.detach(),
            int(model.config.get_text_config().num_hidden_layers),
            self.dtype,
            lm_head=None if output is None else output.weight.detach(),
            kind=self.kind,
        )
        if isinstance(head, DFlashHead):
            return DFlashDrafter(head, vocab_size, **options)
        return HeadDrafter(head, vocab_size, **options)


def load_drafter(
    path: str | Path, dtype: torch.dtype | None = None, *, kind: str | None = None
) -> PreTrainedModel | HeadFile:
    """Return what drafts, from a directory: pass it to `generate` as `drafter`.

    Its config.json says what it is: a causal language model, or a head (EAGLE-3, MTP, DFlash,
    EAGLE) in the format of SGLang or of speculators.

    path: the directory
    dtype: of its weights; by default that of a model's config.json, and of a head's target
    kind: "mtp" reads the MTP layer that is among the target's own weights; path is then the
        target's directory
    """
    folder = Path(path)
    found = kind_of(read_config(folder))
    if kind not in (None, "mtp", found):
        raise Unsupported(f"{folder} as {kind!r}: it is a {found}", fix="leave the kind out")
    if (kind or found) != "model":
        return HeadFile(folder, kind or found, dtype)
    return load_model(folder, dtype or "auto")
