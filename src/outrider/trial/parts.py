"""Finished parts on disk: a rerun uses those made with the same arguments and versions."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.redact import hide

__all__ = ["KERNELS", "Parts"]

FORMAT = 2
"""Of a part's document. Another one is not read."""


KERNELS = "kernels"
"""The part that no model and no server has a share in."""


class Parts:
    """The parts in a folder. One that was made with other arguments or versions is not used.

    here: machine and versions
    arguments: of the servers
    """

    def __init__(
        self,
        folder: Path,
        here: Mapping[str, Any],
        arguments: Mapping[str, Any],
        fresh: bool = False,
    ) -> None:
        self._folder = folder
        self._here, self._arguments = {"format": FORMAT, **here}, dict(arguments)
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)

    def _made_with(self, name: str) -> Any:
        given = self._here | ({} if name == KERNELS else self._arguments)
        return json.loads(json.dumps(given))  # as JSON has it: tuples are lists there

    def path(self, name: str, suffix: str = ".json") -> Path:
        """Return where a part, or its log, is kept."""
        return self._folder / (re.sub(r"\W+", "-", name) + suffix)

    def get(self, name: str) -> dict[str, Any] | None:
        """Return what a finished part found, or None if it is missing, stale or damaged."""
        try:
            document = json.loads(self.path(name).read_text(encoding="utf-8"))
            same = document["made_with"] == self._made_with(name)
            found: dict[str, Any] = document["found"]
            whole = document["sha256"] == _digest(found)
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None
        return found if same and whole else None

    def is_stale(self, name: str) -> bool:
        """Return whether there is a part, and it cannot be used."""
        return self.path(name).exists() and self.get(name) is None

    def put(self, name: str, found: Mapping[str, Any]) -> None:
        """Keep what a part found, whole or not at all."""
        found = json.loads(hide(json.dumps(found)))
        document = {"made_with": self._made_with(name), "sha256": _digest(found), "found": found}
        unfinished = self.path(name, ".unfinished")
        unfinished.write_text(json.dumps(document) + "\n", encoding="utf-8")
        unfinished.replace(self.path(name))


def _digest(found: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
