"""Each flag of this SGLang's own parser: refused, or known to be served or not to matter."""

from __future__ import annotations

import argparse
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from flag_table import PASSED
from sglang.srt import server_args
from sglang.srt.plugins import load_plugins

from outrider.engines.sglang.arguments.flags import REFUSED, WITH_DRAFT_MODEL

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny" / "target"
OURS = ["--model-path", str(TINY), "--device", "cpu", "--speculative-algorithm", "OUTRIDER"]


def parsed():
    """Return this SGLang's flags by their names in its arguments, as the parser has them."""
    load_plugins()
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    args, found = server_args.ServerArgs, {}
    # 0.5.11's arguments are a dataclass, 0.5.23's are msgspec's
    fields = getattr(args, "__struct_fields__", None) or args.__dataclass_fields__
    for action in parser._actions:
        spelt = [action.dest, *(o.lstrip("-").replace("-", "_") for o in action.option_strings)]
        name = next((name for name in spelt if name in fields), action.dest)
        if name != "help":
            found.setdefault(name, action)
    return found


PARSED = parsed()
REFUSALS = [*REFUSED, *WITH_DRAFT_MODEL]


def test_every_flag_is_classified_once():
    names = [name for refusal in REFUSALS for name in refusal.fields]
    names += [name for group in PASSED.values() for name in group.split()]
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert PARSED.keys() - set(names) == set()
    assert len(PARSED) > 350


def test_a_flag_at_its_default_is_not_refused():
    """Not even if it is spelt out: SGLang's arguments do not say."""
    defaults = SimpleNamespace(**{name: action.default for name, action in PARSED.items()})
    assert [refusal.what for refusal in REFUSALS if refusal.asks(defaults)] == []


def value_of(action):
    """Return a value that is not the default, as the command line has it."""
    if action.nargs == 0:
        return []
    if action.choices:
        return [[str(one) for one in action.choices if one != action.default][-1]]
    for value in ("x", "2", '["x"]'):
        with suppress(ValueError, argparse.ArgumentTypeError):
            (action.type or str)(value)
            return [value]
    raise AssertionError(action.dest)


@pytest.mark.parametrize(
    ("refusal", "name"),
    [(refusal, name) for refusal in REFUSALS for name in refusal.fields if name in PARSED],
)
def test_refused_by_name(refusal, name):
    """By SGLang's own parser, before SGLang looks at the flag itself."""
    action = PARSED[name]
    flag = [action.option_strings[0], *value_of(action)]
    if "lora" in name:
        flag += ["--speculative-draft-model-path", str(TINY)]
    with pytest.raises(SystemExit) as stopped:
        getattr(server_args.prepare_server_args([*OURS, *flag]), "resolve_once", bool)()
    assert str(stopped.value) == f"outrider: {refusal.what}; {refusal.fix}"
    if "lora" not in name:
        assert any(refusal.what.startswith(option) for option in action.option_strings)


@pytest.mark.parametrize("value", ["1", "Y"])
def test_the_rust_server_is_refused(value, monkeypatch):
    monkeypatch.setenv("SGLANG_RUST_SERVER", value)
    with pytest.raises(SystemExit, match="SGLANG_RUST_SERVER; unset it"):
        getattr(server_args.prepare_server_args(OURS), "resolve_once", bool)()
