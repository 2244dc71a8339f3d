"""`outrider draft-server`: a draft model in a process of its own."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from typing import Any

import typer

from outrider.errors import UsageError


def run(
    model: str, socket: Path | None, device: str, dtype: str, threads: int | None, **options: Any
) -> None:
    """Load the model and serve until the process is told to end."""
    import torch

    from outrider.clients.models import check_target, load_model
    from outrider.drafters.ahead import DraftServer
    from outrider.engines.transformers.runner import Runner
    from outrider.kernels.sample_match import DeviceCoins

    logging.basicConfig(format="%(name)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    check_target(model)
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda where torch finds no GPU", fix="use --device cpu")
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(model, getattr(torch, dtype)).to(device)
    server = DraftServer(Runner(loaded), DeviceCoins(), socket, name=model, **options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        typer.echo(f"draft server: {model} at {server.path}")
        server.serve()
    finally:
        server.close()
