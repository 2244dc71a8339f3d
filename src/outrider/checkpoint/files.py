"""The files of a checkpoint: where they lead, how large they are, and JSON, read strictly."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.errors import OTHER_FORM, Unsupported

AGAIN = "download it again"

MOST_BYTES = {
    "config.json": 8 << 20,
    "tokenizer.json": 128 << 20,
    "vocab.json": 128 << 20,
    "model.safetensors.index.json": 64 << 20,
}
"""The most bytes of JSON files that are read. The largest known are a quarter of that."""

_MOST_BYTES = 16 << 20  # of others
_MOST_VALUES = 4_000_000  # in lists and objects of one file: it bounds the memory that they take
_MOST_LISTS = 2_000_000
_DEEPEST = 64
_MOST_DIGITS = 40  # tokenizer_config.json has lengths of 31 digits

_STRICT = (
    *("config.json", "generation_config.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)
_COUNTED = ("tokenizer.json", "vocab.json")  # the libraries read these


def real_file(file: Path, root: Path) -> Path:
    """Return a file with its links resolved. Raises Unsupported if it is none, or is elsewhere.

    Links may lead to files within the directory, and within the Hugging Face cache from a snapshot
    to its blobs.
    """
    try:
        target = file.resolve()
        mode = target.stat().st_mode
    except (OSError, RuntimeError, ValueError) as error:  # missing, or a loop of links
        raise Unsupported(f"{file.name} in {root} is missing", fix=AGAIN) from error
    if not any(target.is_relative_to(place) for place in _places(root)):
        raise Unsupported(
            f"{file.name} in {root} is a link to a file elsewhere",
            fix="copy the file there, or link the whole directory",
        )
    if not stat.S_ISREG(mode):
        raise Unsupported(f"{file.name} in {root} is not a regular file", fix=AGAIN)
    return target


def _places(root: Path) -> list[Path]:
    """Return where the files of a directory may be."""
    own = root.resolve()
    cached = [parent.parent / "blobs" for parent in (own, *own.parents) if _is_cache(parent)]
    return [own, *(blobs.resolve() for blobs in cached)]


def _is_cache(folder: Path) -> bool:
    return folder.name == "snapshots" and folder.parent.name.startswith("models--")


def check_files(root: Path) -> None:
    """Refuse a directory if a file of it leads elsewhere, or is JSON of another form than expected.

    Weights are not looked at, see `weights`.
    """
    try:
        entries = sorted(root.iterdir())
    except (OSError, ValueError) as error:
        raise Unsupported(f"{root} is no directory of a model", fix="mend the path") from error
    for entry in entries:
        if entry.is_symlink() or not entry.is_dir():
            _check_entry(entry, root)
    for name in _STRICT:
        if (root / name).exists():
            read_json(root, name)
    for name in _COUNTED:
        if (root / name).exists():
            _content(root, name)
    _check_named(root)


def _check_entry(entry: Path, root: Path) -> None:
    if entry.is_dir():  # by way of a link
        if not any(entry.resolve().is_relative_to(place) for place in _places(root)):
            raise Unsupported(f"{entry.name} in {root} is a link elsewhere", fix=AGAIN)
    elif entry.exists() or entry.suffix in (".json", ".safetensors"):
        real_file(entry, root)


def _check_named(root: Path) -> None:
    """Refuse a tokenizer_config.json that names files elsewhere: Transformers may open them."""
    if not (root / "tokenizer_config.json").exists():
        return
    for key, value in pairs(read_json(root, "tokenizer_config.json")):
        if key.endswith("_file") and isinstance(value, str) and _is_elsewhere(value, root):
            raise Unsupported(
                f"tokenizer_config.json in {root} names a {key:.80} elsewhere",
                fix="put the file there and leave out its path",
            )


def pairs(found: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of an object and of those in it."""
    level: list[Any] = [found]
    while level:
        for value in level:
            if isinstance(value, dict):
                yield from value.items()
        level = [inner for value in level for inner in _inner(value)]


def _is_elsewhere(name: str, root: Path) -> bool:
    """Say whether a path is that of a file here which is not in the directory.

    Paths of other machines are common there, and harmless.
    """
    file = Path(name)
    try:
        if len(file.parts) == 1 or not file.exists():
            return False
        return not any(file.resolve().is_relative_to(place) for place in _places(root))
    except (OSError, RuntimeError, ValueError):
        return False


def read_json(root: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file of a directory. Raises Unsupported if there is none."""
    return parse_json(_content(root, name), f"{name} in {root}")


def _content(root: Path, name: str) -> bytes:
    """Return the bytes of a JSON file, if they are not too many to be read."""
    most = MOST_BYTES.get(name, _MOST_BYTES)
    try:
        with real_file(root / name, root).open("rb") as opened:
            content = opened.read(most + 1)
    except OSError as error:
        raise Unsupported(
            f"{name} in {root} cannot be read ({error.strerror})", fix=AGAIN
        ) from error
    if len(content) > most:
        raise Unsupported(f"{name} in {root} has more than {most:,} bytes", fix=AGAIN)
    _check_count(content, f"{name} in {root}")
    return content


def _check_count(content: bytes, what: str) -> None:
    lists = content.count(b"[") + content.count(b"{")
    if lists > _MOST_LISTS or content.count(b",") > _MOST_VALUES:
        raise Unsupported(f"{what} has too many values", fix=AGAIN)


def parse_json(content: bytes, what: str) -> dict[str, Any]:
    """Return the object in JSON. Raises Unsupported if there is none.

    Refused are keys that stand twice, NaN, numbers of very many digits, and deep nesting.
    """
    _check_count(content, what)
    try:
        found = json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_once,
            parse_constant=_constant,
            parse_int=_integer,
        )
    except OTHER_FORM as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise Unsupported(f"{what} cannot be read ({why:.200})", fix=AGAIN) from error
    if not isinstance(found, dict):
        raise Unsupported(f"{what} is not an object", fix=AGAIN)
    _check_depth(found, what)
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands there twice")
    return found


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is no number")
    return float(name)  # state-space models have a time_step_limit of Infinity


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _check_depth(found: Any, what: str) -> None:
    level: list[Any] = [found]
    for _ in range(_DEEPEST):
        if not level:
            return
        level = [inner for value in level for inner in _inner(value)]
    raise Unsupported(f"{what} is nested too deeply", fix=AGAIN)


def _inner(value: Any) -> Iterable[Any]:
    """Return the lists and objects in a value."""
    values = value.values() if isinstance(value, Mapping) else value
    return (inner for inner in values if isinstance(inner, (dict, list)))
