"""The commands in docs/sglang.md do what the page says; the support matrix is the tests' own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import support_matrix
import typer.main
from server import Server, free_port, proposed

import pages
from outrider.cli.main import app
from pages import PAGES, commands

ROOT = Path(__file__).parents[3]


def blocks(language, page="sglang"):
    """Return what the page says that this file runs, and YAML."""
    found = pages.blocks((ROOT / "docs" / f"{page}.md").read_text())
    ours = [block for block in found if Path(__file__).name in block.mark or language == "yaml"]
    return [block.body for block in ours if block.language == language]


def environment():
    beside = Path(sys.executable).parent
    return {**os.environ, "PATH": f"{beside}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}


class Shell(Server):
    """A server that the page's own command starts."""

    def __init__(self, command: str, log: Path):
        self.port = free_port()
        self.url, self.log = f"http://127.0.0.1:{self.port}", log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                ["bash", "-c", command.replace("30000", str(self.port))],
                cwd=ROOT,
                env=environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
            )


def test_serve_and_ask(logs):
    serve, ask = blocks("bash")
    with Shell(serve, logs / "quickstart.log") as server:
        command = ask.replace("30000", str(server.port))
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=environment(), capture_output=True, text=True
        )
    decoder, rest, answers = json.JSONDecoder(), done.stdout, []
    while rest.startswith("{"):
        answer, end = decoder.raw_decode(rest)
        answers.append(answer)
        rest = rest[end:].lstrip()
    drafted, plain = answers
    assert drafted["output_ids"] == plain["output_ids"]
    assert drafted["meta_info"]["spec_accept_length"] > 1.5
    assert proposed(plain["meta_info"]) == 0
    assert rest.startswith("outrider:accepted")


def test_engine_in_python(tmp_path):
    (code,) = blocks("python")
    script = tmp_path / "quickstart.py"
    script.write_text(code)
    cpu = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, cwd=ROOT, env={**environment(), **cpu}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) >= 1.0


def test_the_profile_on_the_page_is_valid(tmp_path):
    from outrider.serving.profile import load_profile

    (content,) = blocks("yaml", "sglang-settings")
    path = tmp_path / "profile.yaml"
    path.write_text(content)
    assert load_profile(str(path)).max_drafts == 12


def test_flags_on_all_pages_are_sglangs():
    """What follows `outrider serve` or `outrider tune` on any page is our option or SGLang's."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    ours = {
        name
        for command in map(typer.main.get_command(app).commands.get, ("serve", "tune"))
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    for page in PAGES:
        for name, *words in filter(None, commands(page.read_text())):
            if name in ("serve", "tune"):
                options = {word.partition("=")[0] for word in words if word.startswith("--")}
                assert options - ours <= set(parser._option_string_actions), page


@pytest.mark.parametrize("profile", ["no/such/file.yaml", None])
def test_serve_says_what_is_wrong(profile, tmp_path):
    if profile is None:
        profile = tmp_path / "wrong.yaml"
        profile.write_text("draftr: model\n")
    command = [sys.executable, "-m", "outrider", "serve", "--profile", str(profile)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert str(profile) in done.stderr.replace("\n", "")


def test_support_matrix_is_the_tests_own():
    committed = (ROOT / "docs" / "sglang-support.md").read_text()
    assert committed == support_matrix.page()
