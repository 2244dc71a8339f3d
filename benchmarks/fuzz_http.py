"""The door `http` of fuzz.py: options of requests to a real SGLang server on loopback."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import model_path
from fuzz_doors import Broken, Door
from hostile import Hostile

TEXT = "Once upon a time there was a little dog. The little dog"
FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--max-total-tokens", "2048"),
    *("--attention-backend", "outrider", "--speculative-algorithm", "OUTRIDER"),
]


@contextmanager
def server_door(model: str = "stories260k") -> Iterator[Door]:
    """Start a server. Yields a door that asks it, and then asks what it answered at first."""
    from common_sglang import Server, end_servers_at_sigterm, session

    end_servers_at_sigterm()
    logs = Path(tempfile.mkdtemp(prefix="outrider-fuzz-"))
    with Server(Path(model_path(model)), *FLAGS, log=logs / "server.log") as server:

        def ask(options: str) -> Any:
            body = f'{{"text": "{TEXT}", "sampling_params": {{"temperature": 0, '
            body += f'"max_new_tokens": 12, "ignore_eos": true, "custom_params": {options}}}}}'
            return session().post(
                f"{server.url}/generate",
                data=body.encode(errors="replace"),
                headers={"Content-Type": "application/json"},
                timeout=60,
            )

        expected = ask("null").json()["output_ids"]

        def door(rng: Hostile, folder: Path) -> None:
            options: Any = {"max_drafts": 3, "drafter": "ngram", "explain": False}
            options = rng.choice((rng.mutated(options), rng.mutated(options), rng.value()))
            options = rng.nested() if rng.random() < 0.1 else options
            for said in (ask(rng.written({"outrider": options})), ask("null")):
                if said.ok and said.json()["output_ids"] != expected:
                    raise Broken(f"another answer: {said.text[:200]}")
                if not said.ok and said.status_code not in (400, 422):
                    raise Broken(f"status {said.status_code}: {said.text[:200]}")
            if not said.ok:
                raise Broken(f"the server refuses what it answered before: {said.text[:200]}")

        yield door
        server.settle_down()
