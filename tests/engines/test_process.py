"""Processes that tools start."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outrider.engines import process

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
