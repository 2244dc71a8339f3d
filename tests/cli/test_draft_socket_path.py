"""Where `outrider draft-server` puts its socket, and what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.report.console import Exit

DRAFT = Path(__file__).parents[2] / "src" / "outrider" / "assets" / "tiny" / "draft"


def test_without_a_path_it_is_in_a_directory_of_this_user_alone(tmp_path):
    command = [sys.executable, "-m", "outrider", "draft-server", str(DRAFT), "--threads", "1"]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        socket = tmp_path / "outrider" / "draft.sock"
        try:
            assert process.stdout.readline() == f"draft server: {DRAFT} at {socket}\n"
            assert socket.stat().st_mode & 0o777 == 0o600
            assert socket.parent.stat().st_mode & 0o777 == 0o700
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not socket.exists()


@pytest.mark.parametrize(
    ("mode", "path", "said"),
    [
        (0o777, "draft.sock", "others may write to"),
        (0o700, "none/draft.sock", "no directory"),
        (0o700, "x" * 150, "too long"),
        (0o700, ".", "is there and no socket"),
    ],
)
def test_a_path_that_is_refused_is_one_line(tmp_path, mode, path, said):
    tmp_path.chmod(mode)
    found = CliRunner().invoke(app, ["draft-server", str(DRAFT), "--socket", str(tmp_path / path)])
    assert found.exit_code == Exit.USAGE
    assert said in " ".join(found.output.split())
    assert "Traceback" not in found.output


@pytest.mark.parametrize("option", [["--fan-out", "1025"], ["--width", "4097"]])
def test_a_pass_has_its_limits(option):
    """A host refuses more tokens after a node; wider passes help nobody."""
    found = CliRunner().invoke(app, ["draft-server", str(DRAFT), *option])
    assert found.exit_code == Exit.USAGE
    assert option[0] in found.output
