"""The pages hold: their code runs and prints what they say, their commands and files exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import typer.main

from outrider.cli.main import app
from pages import PAGES, ROOT, SHELL, blocks, commands, files, unmarked

COMMANDS = typer.main.get_command(app).commands
NAMED = r"\b(?:tests|docs)/[\w/]+\.\w+"  # files, in the comment before a block


def runs(block) -> bool:
    """Whether a block is run here: Python unless its mark says otherwise, shell if it says so."""
    if block.language in SHELL:
        return block.mark.startswith("test")
    return block.language == "python" and not block.mark.startswith(("not run", "run by"))


# README's code names models of the hub; test_readme.py runs it with others
RUN = [p for p in PAGES if p.name != "README.md" and any(map(runs, blocks(p.read_text())))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs(page, tmp_path, monkeypatch, capsys):
    """From top to bottom, in a folder that looks like a checkout and may be written to."""
    for name in ("src", "docs", "benchmarks", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "80")
    namespace = {"__name__": "__main__"}
    for block in filter(runs, blocks(page.read_text())):
        if block.language in SHELL:
            shell(block)
            continue
        capsys.readouterr()
        exec(compile(block.body, page.name, "exec"), namespace)
        if block.prints is not None:
            assert capsys.readouterr().out == block.prints


def shell(block) -> None:
    """Run a block of commands; the comment before it may say how it ends: `test: exit 1`.

    A text block that follows is what they print on stdout, except for times and trailing spaces.
    """
    expected = int((re.search(r"exit (\d+)", block.mark) or [0, 0])[1])
    body = re.sub(r"^\$ ", "", block.body, flags=re.MULTILINE)
    done = subprocess.run(["bash", "-ec", body], capture_output=True, text=True)
    assert done.returncode == expected, f"{body}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    if block.prints is not None:
        assert timeless(done.stdout) == timeless(block.prints)


def timeless(printed: str) -> str:
    return re.sub(r"\d+\.\d s$| +$", "", printed, flags=re.MULTILINE)


def wrong(page: str) -> list[str]:
    """Return what a page says of commands or options that do not exist."""
    found = []
    for words in commands(page):
        if not words or words[0].startswith("-"):
            continue
        command = COMMANDS.get(words[0])
        if command is None:
            found.append(f"outrider {words[0]}")
            continue
        known = {"--help"} | {name for p in command.params for name in p.opts + p.secondary_opts}
        others = command.context_settings.get("ignore_unknown_options")  # SGLang's, then
        # what follows -- is passed on to SGLang
        for word in takewhile(lambda word: word != "--", words[1:]):
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known and not others:
                found.append(f"outrider {words[0]} {option}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    text = page.read_text()
    assert wrong(text) == []
    assert [name for name in sorted(files(text)) if not (ROOT / name).exists()] == []
    assert re.findall(r"^[A-Z]+_[A-Z_]+$", text, re.MULTILINE) == []  # places left to fill
    assert missing_tests(text) == []


def missing_tests(page: str) -> list[str]:
    """Return the tests that a page names, as `file::test`, and that do not exist."""
    found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    return [
        f"{file}::{test}"
        for file, test in found
        if not (ROOT / file).exists() or f"\ndef {test}(" not in (ROOT / file).read_text()
    ]


def test_every_answer_of_the_faq_names_a_test():
    answers = re.split(r"^## ", (ROOT / "docs" / "faq.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(answers) >= 10
    assert [a.splitlines()[0] for a in answers if "Shown by `tests/" not in a] == []


def test_twin_a_test_that_does_not_exist_is_seen():
    assert missing_tests("`tests/test_docs.py::test_no_such`, `tests/no.py::test_a`") == [
        "tests/test_docs.py::test_no_such",
        "tests/no.py::test_a",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_shell_block_says_who_runs_it(page):
    """`test`: this file does. `run by tests/...`, or `not run: why`; both name files that exist."""
    text = page.read_text()
    assert unmarked(text) == []
    named = {name for block in blocks(text) for name in re.findall(NAMED, block.mark)}
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    "page",
    [
        "```bash\noutrider demo\n```",
        "<!-- not run -->\n```bash\noutrider demo\n```",
        "<!-- tested -->\n```console\n$ outrider demo\n```",
        "text\n\n    A=1 python -m outrider demo\n",
    ],
)
def test_twin_a_block_that_nobody_runs_is_seen(page):
    assert len(unmarked(page)) == 1


def test_every_command_has_its_page():
    said = {words[0] for page in PAGES for words in commands(page.read_text()) if words}
    assert set(COMMANDS) <= said


@pytest.mark.parametrize(
    "page",
    [
        "```bash\nexport A=1\noutrider dmeo --seed 1\n```",
        "    ./scripts/setup && .venv/bin/outrider demo \\\n        --sed 3\n",
        "see `outrider selftest --quik`",
    ],
)
def test_twin_a_typo_is_seen(page):
    assert len(wrong(page)) == 1
    mended = page.replace("dmeo", "demo").replace("--sed", "--seed").replace("--quik", "--quick")
    assert wrong(mended) == []


def test_pictures_show_what_the_code_does():
    """The same words and fates; if not, run `python scripts/make_pictures.py`."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "make_pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)

    def said(svg: str) -> list[tuple[str, str]]:
        return sorted(re.findall(r'class="([ne]-\w+)"|<text[^>]*>([^<]*)</text>', svg))

    for name, make in pictures.PICTURES.items():
        committed = (ROOT / "docs" / "img" / f"{name}.svg").read_text()
        assert len(said(committed)) > 4
        assert said(make()) == said(committed), name
