"""Dependencies: locks have a hash for every pin, and advisories are looked up or said to be not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "audit_dependencies.py"


@pytest.mark.parametrize("name", ["build", "docs", "image", "release"])
def test_a_lock(name):
    asked = (ROOT / "requirements" / f"{name}.txt").read_text()
    blocks = re.split(r"\n(?=\S)", (ROOT / "requirements" / f"{name}.lock").read_text())
    locked = {}
    for block in blocks:
        pin = block.split()[0]
        assert re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.]+", pin), pin
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), pin
        locked[pin.partition("==")[0]] = pin
    for line in asked.splitlines():
        if line and not line.startswith("#"):
            package = line.partition("==")[0]
            assert locked[package] == line or "==" not in line


def audit(tmp_path, dependencies):
    """Run the script with a pip-audit that says this of what it is asked."""
    (tmp_path / "pip_audit.py").write_text(f"print({json.dumps(json.dumps(dependencies))})")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(SCRIPT)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


KNOWN = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1"}]}
UNKNOWN = {"name": "c", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ({"dependencies": [KNOWN, UNKNOWN]}, 0, "0 with advisories"),
        ({"dependencies": [KNOWN, BAD]}, 1, "b 2: CVE-1"),
        ({"dependencies": [UNKNOWN]}, 0, "skipped"),
        ("no answer", 0, "skipped"),
    ],
)
def test_advisories(found, code, said, tmp_path):
    done = audit(tmp_path, found)
    assert done.returncode == code
    assert said in done.stdout + done.stderr
