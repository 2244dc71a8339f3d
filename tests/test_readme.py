"""What the README shows works as shown."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_example_runs(monkeypatch, capsys):
    """The code of the README, with the models of the package in place of larger ones."""
    code = re.search(r"```python\n(import outrider.*?)```", README, re.DOTALL).group(1)
    tiny = ROOT / "src" / "outrider" / "assets" / "tiny"
    for name, which in (("1.5B", "target"), ("0.5B", "draft")):
        code, count = re.subn(rf'"Qwen/Qwen2.5-Coder-{name}-Instruct"', f'"{tiny / which}"', code)
        assert count == 1
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert float(capsys.readouterr().out.split()[-1]) > 1
    # the three lines of the first screen, with the same models
    lines = re.search(r"```python\n(done = outrider.*?)```", README, re.DOTALL).group(1)
    exec(compile(lines, "README.md", "exec"), names)
    assert float(capsys.readouterr().out.split()[-1]) > 1


def test_the_first_screen_has_what_a_visitor_looks_for():
    """A claim, what is known of speed, a picture made by our own code, install, use."""
    screen = README.partition("\n## ")[0]
    assert len(screen.splitlines()) < 40
    (picture,) = re.findall(r"!\[[^\]]+\]\(docs/img/(\w+)\.svg\)", screen)
    assert f"def {picture}(" in (ROOT / "scripts" / "make_pictures.py").read_text()
    assert "\npip install " in screen
    assert "outrider.generate(" in screen
    # a figure has its conditions; without one, the page says so
    conditions = r"times[^.]*?(?:\.\d+[^.]*?)*(?:CPU cores|simulated)"
    figures = len(re.findall(r"\d\.\d\d times", screen))
    assert figures == len(re.findall(rf"\d\.\d\d {conditions}", screen, re.DOTALL))
    assert figures or "measured again" in screen
    assert "(docs/guarantee.md#what-was-wrong-until-this-version)" in screen


def test_files_that_are_named_exist():
    named = re.findall(r"`((?:src|tests|benchmarks|scripts)/[\w./]+)`", README)
    named += re.findall(r"\]\((\w[\w./]+)\)", README)
    assert named
    for name in named:
        assert (ROOT / name).exists(), name
