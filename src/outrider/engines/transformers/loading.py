"""Models and tokenizers from a directory, as data: the one place where Transformers loads them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging

from outrider.checkpoint import Checkpoint, check_files, checked, misfits, model_files, read_json
from outrider.errors import Unsupported

ONLY_DATA = {"trust_remote_code": False, "local_files_only": True}
"""No code of a checkpoint is run or asked about, and nothing is fetched."""

AGAIN = "download it again, as safetensors"
_SPARE = 1 << 22  # numbers that a model may have beside those in its files
_MOST_MODULES = 100_000
_PER_BYTE = 8  # numbers of one bit


_DOCUMENTS = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]


def directory_of(name: str, weights: bool = True) -> Path:
    """Return the directory of a model: a path, or a name of the Hugging Face hub.

    Of the hub's files only data are downloaded: JSON, vocabularies and safetensors.
    """
    if os.path.isdir(name):
        return Path(name)
    if os.path.exists(name) or name.count("/") > 1 or name.startswith(("/", ".", "~")):
        raise Unsupported("no such directory", fix="mend the path")
    from huggingface_hub import snapshot_download

    with quiet(), _refusing(f"{name:.200} is no directory, nor to be had from the hub", "mend it"):
        root = Path(snapshot_download(name, allow_patterns=_DOCUMENTS, ignore_patterns=["*/*"]))
        if weights:
            files = [file.name for file in model_files(root)] or ["model.safetensors"]
            root = Path(snapshot_download(name, allow_patterns=files))
    return root


def load_model(path: Path, dtype: Any = "auto") -> PreTrainedModel:
    """Return the model in a directory, whole and finite, ready to generate.

    Only safetensors are read, and none of its code is run. Its sizes are held against the headers
    of its weights before memory is taken. Raises Unsupported for everything else.
    """
    found = checked(path)
    what = f"the model at {path}"
    with quiet(), _refusing(what, AGAIN):
        config = check_build(found)
        made, about = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            **ONLY_DATA,
        )
    if missing := sorted(map(str, about["missing_keys"])):
        raise Unsupported(f"{what} lacks {', '.join(missing)}", fix=AGAIN)
    broken = sorted(n for n, weight in made.named_parameters() if not weight.isfinite().all())
    if broken:
        raise Unsupported(f"{what}: NaN or infinity in {', '.join(broken)}", fix=AGAIN)
    ready: PreTrainedModel = made.eval()
    with quiet(), _refusing(what, AGAIN):
        _try(ready)
    return ready


@torch.inference_mode()
def _try(model: PreTrainedModel) -> None:
    """Run the model over two tokens: some of what a config.json may say fails no earlier."""
    needs_device = getattr(model.config, "quantization_config", None) is not None
    if not needs_device and model.config._attn_implementation in ("eager", "sdpa"):
        model(torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer in a directory. Raises Unsupported if there is none."""
    check_files(path)
    if (path / "config.json").exists():  # Transformers reads it first
        for error in misfits(Checkpoint(path, read_json(path, "config.json"), None)):
            raise error
    with quiet(), _refusing(f"the tokenizer at {path}", "download its tokenizer.json again"):
        found = AutoTokenizer.from_pretrained(path, **ONLY_DATA)
        found.encode("a")  # the libraries find some faults no earlier
    return found


def is_known(found: Checkpoint) -> bool:
    """Say whether Transformers has a class for the model, by the name in its config.json."""
    return found.config.get("model_type") in CONFIG_MAPPING_NAMES


def check_model(found: Checkpoint) -> None:
    """Raise Unsupported if Transformers cannot build the model, or the weights are not its own."""
    with quiet(), _refusing(f"the model at {found.path}", AGAIN):
        check_build(found)


def check_build(found: Checkpoint) -> Any:
    """Return the config, if the model that it describes is as large as the weights.

    The model is built without memory. Building stops as soon as it is too large.
    """
    if found.config.get("auto_map") and not is_known(found):
        raise Unsupported(
            f"the model at {found.path} comes with code, which is not run",
            fix="use a model that Transformers has a class for",
        )
    config = AutoConfig.from_pretrained(found.path, **ONLY_DATA)
    most = found.count + _SPARE
    if found.config.get("quantization_config"):
        most = _PER_BYTE * found.stored + _SPARE
    with _counting(2 * most), torch.device("meta"):  # tied tables are counted twice at first
        made = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        made.tie_weights()
    held = {id(weight): weight.numel() for weight in made.parameters()}
    if sum(held.values()) > most:
        raise Unsupported(
            f"config.json in {found.path} is of a model of {sum(held.values()):,} numbers, its "
            f"weights are {found.count:,}",
            fix=AGAIN,
        )
    return config


@contextmanager
def _counting(most: int) -> Iterator[None]:
    """Refuse models that become larger than this while they are built, or that never end."""
    numbers = modules = 0

    def count(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        nonlocal numbers
        numbers += 0 if tensor is None else tensor.numel()
        if numbers > most:
            raise Unsupported(f"config.json is of a model of more than {most:,} numbers", fix=AGAIN)

    def count_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        nonlocal modules
        modules += 1
        if modules > _MOST_MODULES:
            what = f"config.json is of a model of more than {_MOST_MODULES:,} parts"
            raise Unsupported(what, fix=AGAIN)

    registered = [
        hooks.register_module_parameter_registration_hook(count),
        hooks.register_module_buffer_registration_hook(count),
        hooks.register_module_module_registration_hook(count_module),
    ]
    try:
        yield
    finally:
        for hook in registered:
            hook.remove()


@contextmanager
def _refusing(what: str, fix: str) -> Iterator[None]:
    """Refuse in one line whatever the libraries raise that read a part of it."""
    try:
        yield
    except Unsupported:
        raise
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust's is no Exception
        why = str(error) if " " in str(error) else repr(error)
        raise Unsupported(
            f"{what} cannot be read ({' '.join(why.split()):.200})", fix=fix
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Let Transformers show no progress and no warnings."""
    level, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
