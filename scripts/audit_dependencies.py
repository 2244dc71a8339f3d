"""Look up known vulnerabilities of every pinned dependency, with pip-audit.

    pip install -r requirements/release.lock && python scripts/audit_dependencies.py

Exits with 1 if one is known. What the registry tells nothing of is counted, not called good: if
that is everything (offline, or a mirror without advisories), the check says that it was skipped.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PINNED = re.compile(r"^([A-Za-z0-9._-]+(?:\[\w+\])?==[\w.+!-]+)", re.MULTILINE)
LOWEST = ("lowest.txt", "transformers-lowest.txt")
"""Old versions that CI installs to see that they work. Nobody is told to use them."""


def main() -> None:
    """Audit requirements/, and say what was found."""
    files = sorted((Path(__file__).parents[1] / "requirements").iterdir())
    pins = {pin for f in files if f.name not in LOWEST for pin in PINNED.findall(f.read_text())}
    audited, skipped, bad = 0, 0, []
    # a name may be pinned to several versions in several files
    for group in _groups(sorted(pins)):
        for one in _audit(group):
            skipped += "skip_reason" in one
            audited += "skip_reason" not in one
            ids = ", ".join(vuln["id"] for vuln in one.get("vulns", ()))
            bad += [f"{one['name']} {one['version']}: {ids}"] if ids else []
    if not audited:
        print(f"skipped: nothing is known here of {skipped} dependencies (offline?)")
        return
    print(f"{audited} dependencies looked up, {skipped} unknown, {len(bad)} with advisories")
    sys.exit("\n".join(bad) or None)


def _groups(pins: list[str]) -> list[list[str]]:
    """Return lists of pins in each of which a package occurs once."""
    groups: list[dict[str, str]] = []
    for pin in pins:
        name = re.split(r"[\[=]", pin)[0].lower().replace("_", "-")
        group = next((group for group in groups if name not in group), None)
        if group is None:
            groups.append(group := {})
        group[name] = pin
    return [list(group.values()) for group in groups]


def _audit(pins: list[str]) -> Any:
    """Return what pip-audit says of each."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins) + "\n")
        file.flush()
        command = [sys.executable, "-m", "pip_audit", "-r", file.name, "-f", "json"]
        command += ["--no-deps", "--disable-pip", "--progress-spinner", "off"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout)["dependencies"]
    except (ValueError, LookupError, TypeError):
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [{"name": pin, "skip_reason": reason} for pin in pins]


if __name__ == "__main__":
    main()
