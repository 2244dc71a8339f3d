"""Heads in SGLang: which there are, what they read of the target, and how they are loaded.

How they run is in `slot_heads` and `slot_blocks`. They are modules of our own, not SGLang's: they
read both published formats, they are the same in all versions and hosts, and they need no
collective calls. With tensor parallelism rank 0 has the heads, because it has the whole of the
target's states, and it alone drafts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.core import Unsupported
from outrider.drafters.heads import (
    DFlashHead,
    HeadConfig,
    has_mtp,
    head_layers,
    head_shape,
    kind_of,
    load_head,
    read_config,
)
from outrider.engines.sglang.arguments.chosen import refusing_start
from outrider.engines.sglang.drafts.slot_blocks import SglangBlocks
from outrider.engines.sglang.drafts.slot_heads import SglangHead, SlotHead
from outrider.engines.sglang.versions.base import SglangVersion
from outrider.serving.profile import MODEL, Profile, load_profile
from outrider.serving.ranks import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeadSource:
    """Where a head's files are.

    path: a directory, or a name on the Hugging Face hub
    kind: what to read there if the files are the target's own: "mtp"; None: what config.json says
    """

    path: str
    kind: str | None = None

    @property
    def folder(self) -> Path:
        """The directory: `path`, or what the Hugging Face hub has by this name."""
        if os.path.isdir(self.path):
            return Path(self.path)
        from huggingface_hub import errors, snapshot_download

        try:
            return Path(snapshot_download(self.path, allow_patterns=["*.json", "*.safetensors"]))
        except (
            errors.HfHubHTTPError,
            errors.HFValidationError,
            errors.LocalEntryNotFoundError,
            OSError,
        ) as error:
            raise Unsupported(f"the head {self.path}: {error}", fix="name a directory") from None

    def shape(self) -> HeadConfig:
        """Return the shape of the head. Raises Unsupported if there is none that we know."""
        return head_shape(read_config(self.folder), self.path, self.kind)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of the target whose states it reads, as Transformers counts them."""
        return head_layers(read_config(self.folder), num_layers, self.kind)

    def cell_bytes(self, itemsize: int) -> int:
        """Return what a token takes in its buffers."""
        kind = self.kind or kind_of(read_config(self.folder))
        made = SglangBlocks if kind == "dflash" else SglangHead
        return made.cell(self.shape()) * itemsize


def draft_kind(server_args: Any) -> str | None:
    """Return what --speculative-draft-model-path names: None, "model", or a kind of head.

    The target's own path names the MTP layer among its weights, if config.json says that there is
    one.
    """
    path = server_args.speculative_draft_model_path
    return None if path is None else _kind_at(path, _is_target(server_args))


def _is_target(server_args: Any) -> bool:
    """Say whether the draft model's files are the target's own."""
    path, target = Path(server_args.speculative_draft_model_path), Path(server_args.model_path)
    return path == target or (path.is_dir() and target.is_dir() and path.samefile(target))


@lru_cache(maxsize=16)
def _kind_at(path: str, is_target: bool) -> str:
    from transformers.utils import cached_file

    try:
        file = cached_file(path, "config.json")
    except OSError as error:
        raise Unsupported(f"the draft model {path}: {error}", fix="check the path") from None
    config = read_config(Path(str(file)).parent)
    kind = kind_of(config)
    return "mtp" if kind == MODEL and is_target and has_mtp(config) else kind


def head_sources(profile: Profile, server_args: Any) -> dict[str, HeadSource]:
    """Return where the server's heads are, by the names that requests call them by."""
    found = {}
    for name in profile.head_names():
        path, kind = (profile.drafters[name].get(key) for key in ("path", "kind"))
        if kind not in (None, "mtp"):
            raise Unsupported(
                f"kind {kind!r} of the profile's drafter {name!r}",
                fix="leave it out, or write mtp for the layer among the target's own weights",
            )
        found[name] = HeadSource(str(path or server_args.model_path), kind)
    kind = draft_kind(server_args)
    if kind is None or kind == MODEL:
        return found
    if kind in found:
        raise Unsupported(
            f"two heads of the name {kind!r}, by --speculative-draft-model-path and the profile",
            fix="give the profile's another name",
        )
    own = HeadSource(
        server_args.speculative_draft_model_path, kind if _is_target(server_args) else None
    )
    return {kind: own, **found}


def layers_to_capture(sources: Sequence[HeadSource], num_layers: int) -> list[int]:
    """Return the layers whose states these heads read, as Transformers counts them, in order."""
    read = {source: source.layers(num_layers) for source in sources}
    found = sorted({layer for layers in read.values() for layer in layers})
    if found != [num_layers] and not all(0 < i < num_layers for i in found):
        said = "; ".join(
            f"{head.path} reads layers {list(layers)}" for head, layers in read.items()
        )
        raise Unsupported(
            f"these heads together: {said}",
            fix=f"SGLang gives the states of layers 1 to {num_layers - 1}, or those of the last",
        )
    return found


def capture_states(runner: Any, version: SglangVersion) -> None:
    """Let the target's passes return the states that the heads read. Before graphs are made.

    runner: the target's
    """
    sources = head_sources(load_profile(), version.arguments(runner.server_args))
    if not sources:
        return
    model, name = runner.model, type(runner.model).__name__
    with refusing_start():
        layers = layers_to_capture([*sources.values()], _num_layers(runner))
        if layers != [_num_layers(runner)]:
            if not hasattr(model, "set_eagle3_layers_to_capture"):
                raise Unsupported(
                    f"a head with {name}", fix="SGLang gives no hidden states of this model"
                )
            model.set_eagle3_layers_to_capture([i - 1 for i in layers])  # it counts outputs
    version.return_states(runner)


def load_heads(
    sources: dict[str, HeadSource], runner: Any, ranks: Ranks, version: SglangVersion
) -> dict[str, SlotHead | None]:
    """Return the heads by name; None on ranks other than 0, which drafts. All ranks must call."""
    if not sources:
        return {}
    model, num_layers = runner.model, _num_layers(runner)
    embedding, lm_head = (
        ranks.whole(module.weight)[: runner.model_config.vocab_size]
        for module in (model.get_input_embeddings(), model.lm_head)
    )
    captured = layers_to_capture([*sources.values()], num_layers)
    heads: dict[str, SlotHead | None] = dict.fromkeys(sources)
    for name, source in sources.items() if ranks.leads else ():
        head = load_head(source.folder, embedding, num_layers, lm_head=lm_head, kind=source.kind)
        heads[name] = made = (
            SglangBlocks(head, runner, captured, version)
            if isinstance(head, DFlashHead)
            else SglangHead(head, runner, captured, version)
        )
        sizes = made.weight_bytes / 2**30, made.pool_bytes / 2**30
        logger.info(
            "head %s (%s, %s): %.2f GiB of weights of its own, %.2f GiB of states and cache",
            *(name, head.name, source.path, *sizes),
        )
    return heads


def _num_layers(runner: Any) -> int:
    return int(runner.model_config.num_hidden_layers)
