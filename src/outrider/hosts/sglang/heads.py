"""Heads in SGLang: which there are, what they read of the target, and how they are loaded.

How they run is in `slot_heads` and `slot_blocks`. They are modules of our own, not SGLang's: they
read both published formats, they are the same in all versions and hosts, and they need no
collective calls. With tensor parallelism rank 0 has the heads, because it has the whole of the
target's states, and it alone drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from outrider.core import Unsupported
from outrider.drafters.heads import (
    DFlashHead,
    head_layers,
    head_shape,
    kind_of,
    load_head,
    read_config,
)
from outrider.hosts.sglang.host import host
from outrider.hosts.sglang.profile import MODEL, Profile, load_profile
from outrider.hosts.sglang.ranks import Ranks
from outrider.hosts.sglang.slot_blocks import SglangBlocks
from outrider.hosts.sglang.slot_heads import SglangHead, SlotHead

logger = logging.getLogger(__name__)


def folder_of(name: str) -> Path:
    """Return the directory of a head: this path, or what the Hugging Face hub has by this name."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise Unsupported(f"the head {name}: {error}", fix="name a directory") from None


@lru_cache(maxsize=16)
def draft_kind(path: str | None) -> str | None:
    """Return what --speculative-draft-model-path names: None, "model", or a kind of head."""
    if path is None:
        return None
    from transformers.utils import cached_file

    try:
        config = cached_file(path, "config.json")
    except OSError as error:
        raise Unsupported(f"the draft model {path}: {error}", fix="check the path") from None
    return kind_of(read_config(Path(str(config)).parent))


def head_paths(profile: Profile, server_args: Any) -> dict[str, str]:
    """Return the paths of the server's heads by the names that requests call them by."""
    path = server_args.speculative_draft_model_path
    kind = draft_kind(path)
    own = {} if kind is None or kind == MODEL else {kind: str(path)}
    others = profile.head_paths()
    if own.keys() & others:
        raise Unsupported(
            f"two heads of the name {kind!r}, by --speculative-draft-model-path and the profile",
            fix="give the profile's another name",
        )
    return own | others


def layers_to_capture(paths: Sequence[str], num_layers: int) -> list[int]:
    """Return the layers whose states these heads read, as Transformers counts them, in order."""
    read = {path: head_layers(read_config(folder_of(path)), num_layers) for path in paths}
    found = sorted({layer for layers in read.values() for layer in layers})
    if found != [num_layers] and not all(0 < i < num_layers for i in found):
        said = "; ".join(f"{path} reads layers {list(layers)}" for path, layers in read.items())
        raise Unsupported(
            f"these heads together: {said}",
            fix=f"SGLang gives the states of layers 1 to {num_layers - 1}, or those of the last",
        )
    return found


def capture_states(runner: Any) -> None:
    """Let the target's passes return the states that the heads read. Before graphs are made.

    runner: the target's
    """
    paths = head_paths(load_profile(), host().arguments(runner.server_args))
    if not paths:
        return
    model, name = runner.model, type(runner.model).__name__
    try:
        layers = layers_to_capture([*paths.values()], _num_layers(runner))
        if layers != [_num_layers(runner)]:
            if not hasattr(model, "set_eagle3_layers_to_capture"):
                raise Unsupported(
                    f"a head with {name}", fix="SGLang gives no hidden states of this model"
                )
            model.set_eagle3_layers_to_capture([i - 1 for i in layers])  # it counts outputs
    except Unsupported as error:
        raise SystemExit(f"outrider: {error}") from error
    host().return_states(runner)


def head_cell_bytes(path: str, itemsize: int) -> int:
    """Return what a token takes in the buffers of a head."""
    config = read_config(folder_of(path))
    made = SglangBlocks if kind_of(config) == "dflash" else SglangHead
    return made.cell(head_shape(config, path)) * itemsize


def load_heads(paths: dict[str, str], runner: Any, ranks: Ranks) -> dict[str, SlotHead | None]:
    """Return the heads by name; None on ranks other than 0, which drafts. All ranks must call."""
    if not paths:
        return {}
    model, num_layers = runner.model, _num_layers(runner)
    embedding, lm_head = (
        ranks.whole(module.weight)[: runner.model_config.vocab_size]
        for module in (model.get_input_embeddings(), model.lm_head)
    )
    captured = layers_to_capture([*paths.values()], num_layers)
    heads: dict[str, SlotHead | None] = dict.fromkeys(paths)
    for name, path in paths.items() if ranks.leads else ():
        head = load_head(folder_of(path), embedding, num_layers, lm_head=lm_head)
        heads[name] = made = (
            SglangBlocks(head, runner, captured)
            if isinstance(head, DFlashHead)
            else SglangHead(head, runner, captured)
        )
        logger.info(
            "head %s (%s, %s): %.2f GiB of weights of its own, %.2f GiB of states and "
            "cache", name, head.name, path, made.weight_bytes / 2**30, made.pool_bytes / 2**30,
        )  # fmt: skip
    return heads


def _num_layers(runner: Any) -> int:
    return int(runner.model_config.num_hidden_layers)
