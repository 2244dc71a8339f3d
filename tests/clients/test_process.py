"""Processes that tools start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.clients import process
from outrider.errors import UsageError

LAUNCH = (
    "import sys; from outrider.cli import serve;"
    "serve.sglang_command = lambda: [sys.executable, '-m', 'json.tool', '--help'];"
    "serve.run(None, [])"
)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 is the first that can")
@pytest.mark.parametrize("started", ["child", "serve"])
def test_nothing_is_imported_from_the_working_directory(started, tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("print('imported from here')")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "json.tool", "--help"]
    # the twin: without the variable it is found
    assert "imported from here" in subprocess.run(command, capture_output=True, text=True).stdout
    if started == "serve":
        command = [sys.executable, "-P", "-c", LAUNCH]
    with process.child(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        said, _ = running.communicate()
    assert b"usage:" in said, said
    assert b"imported from here" not in said


LISTEN = (
    "import os, socket, sys, time; os.setuid(65534); s = socket.socket();"
    "s.bind(('127.0.0.1', 0)); s.listen(); print(s.getsockname()[1], flush=True); time.sleep(60)"
)


def test_a_listener_is_known():
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", 0))
        port = mine.getsockname()[1]
        tables = Path("/proc/net/tcp")
        assert port not in dict(process.listeners(tables.read_text()))
        mine.listen()
        assert dict(process.listeners(tables.read_text()))[port] == os.geteuid()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_port_that_another_user_took_is_not_asked(tmp_path, monkeypatch):
    command = [sys.executable, "-c", LISTEN]
    with process.child(command, stdout=subprocess.PIPE, text=True) as other:
        port = int(other.stdout.readline())
        monkeypatch.setattr(process, "_free_port", lambda: port)
        asleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        started = time.monotonic()
        with (
            pytest.raises(UsageError, match=f"another user listens at port {port}"),
            process.serving(asleep, tmp_path / "log"),
        ):
            pass
        assert time.monotonic() - started < 30
