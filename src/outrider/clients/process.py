"""Servers as child processes: started on a port of their own, and always ended with their group."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import IO, Any

from outrider.clients.http import Client, Limits
from outrider.errors import Unsupported, UsageError
from outrider.redact import redact

__all__ = ["child", "safe", "serving", "sglang_command", "tail"]

START = 600.0
"""Seconds that a server may take to load."""

WRITTEN = 5.0
"""Seconds after a server's end in which the rest of its output is written."""


def sglang_command() -> list[str]:
    """Return how SGLang's server is started here. Raises Unsupported where there is none."""
    if importlib.util.find_spec("sglang") is None:
        raise Unsupported("SGLang is not installed here", fix="pip install sglang==0.5.23")
    return [sys.executable, "-m", "sglang.launch_server"]


@contextmanager
def serving(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    limit: float = START,
) -> Iterator[str]:
    """Start a server with its counters on, yield its address when it answers, and end it.

    log: where its output goes
    limit: seconds that it may take to load
    """
    port = _free_port()
    command = [*command, "--host", "127.0.0.1", "--port", str(port), "--enable-metrics"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    out, copying = log.open("w", encoding="utf-8"), None
    try:
        with child(command, environment, **options) as process:
            copying = Thread(target=_copy, args=(process.stdout, out), daemon=True)
            copying.start()
            _wait(port, process, log, limit, copying)
            yield _address(port)
    finally:
        if copying is not None:
            copying.join(WRITTEN)


def _copy(source: IO[bytes], log: IO[str]) -> None:
    """Write what a server says into its log, line by line and without secrets.

    SGLang says all of its arguments there, and users attach the log to an issue.
    """
    with source, log:
        for line in source:
            log.write(redact(line.decode(errors="replace").rstrip("\n")) + "\n")
            log.flush()


def safe(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment, this process's unless given, in which Python looks for no modules in
    the working directory.

    `python -m` would: who runs a tool beside a checkpoint would run what lies there as `torch.py`.
    Python 3.10 does not know the variable.
    """
    return {**(os.environ if environment is None else environment), "PYTHONSAFEPATH": "1"}


@contextmanager
def child(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process in a group of its own, and end the group however this block ends."""
    options |= {"start_new_session": True, "env": safe(environment)}
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        try:
            _stop(process)
        except BaseException:  # Ctrl-C twice
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def tail(log: Path, lines: int) -> list[str]:
    """Return the last lines of a log that say something."""
    text = log.read_text(errors="replace") if log.exists() else ""
    return [line[:300] for line in text.splitlines() if line.strip()][-lines:]


def _free_port() -> int:
    """Return a port that nobody has; SGLang takes one 10,000 above it too.

    Both below 32,768: from there on clients get theirs, and may take it while the server loads.
    """
    for port in range(20_000, 22_000, 7):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port
    raise Unsupported("no free port", fix="end a server, or name a running one")


def _address(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def _wait(
    port: int, process: subprocess.Popen[bytes], log: Path, limit: float, copying: Thread
) -> None:
    client, deadline = Client(_address(port)), time.monotonic() + limit
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            copying.join(WRITTEN)
            why = "; ".join(tail(log, 3))
            # argparse's code and ours: an option or the profile cannot be understood
            kind = UsageError if code == 2 else Unsupported
            raise kind(f"the server did not start: {why}", fix=f"all of it is in {log}")
        _check_listener(port)
        with suppress(Unsupported):
            if client.ask("/health", limits=Limits(seconds=5.0)).status == 200:
                return
        time.sleep(0.5)
    raise Unsupported(f"no answer from the server in {limit:.0f} s", fix=f"look into {log}")


def _check_listener(port: int) -> None:
    """Raise UsageError if another user listens at a port of this machine.

    He took it between our choice and the server's start. He would be asked our prompts, with our
    key. Where there is no such file as on Linux nothing is known.
    """
    for file in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(OSError):
            found = {user for number, user in listeners(file.read_text()) if number == port}
            if not found <= {0, os.geteuid()}:
                raise UsageError(f"another user listens at port {port}", fix="run it again")


def listeners(table: str) -> Iterator[tuple[int, int]]:
    """Yield the port and the user of each listening socket in a table as of /proc/net/tcp."""
    for line in table.splitlines()[1:]:
        _, local, _, state, _, _, _, user, *_ = line.split()
        if state == "0A":
            yield int(local.rpartition(":")[2], 16), int(user)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: they are a group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        # the others need a moment; as zombies that nobody reaps they may stay for good
        deadline = time.monotonic() + 2
        while _group_lives(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
