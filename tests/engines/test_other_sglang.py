"""Which hooks are laid in an SGLang of another version, by the shape of its arguments."""

from __future__ import annotations

import enum
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from outrider import __version__
from outrider.engines.sglang import plugin
from outrider.engines.sglang.versions import guest
from outrider.engines.sglang.versions.contract import VERSIONS


class HookType(enum.Enum):
    BEFORE = enum.auto()


def with_method(name):
    def __init__(self, algorithm=None):
        self.speculative_algorithm = algorithm

    return type("ServerArgs", (), {"__init__": __init__, name: lambda self: None})


@pytest.fixture
def host(monkeypatch):
    """Return a function that makes an SGLang 0.5.99 with these arguments, and our hooks in it."""

    def make(**contents):
        hooks = {}
        registry = SimpleNamespace(
            register=lambda target, hook, kind: hooks.update({target: (hook, kind)})
        )
        modules = {
            "sglang": {"__version__": "0.5.99"},
            "sglang.srt": {},
            "sglang.srt.server_args": contents,
            "sglang.srt.plugins": {},
            "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": HookType},
        }
        for name, attributes in modules.items():
            module = ModuleType(name)
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        plugin.register()
        assert {kind for _, kind in hooks.values()} <= {HookType.BEFORE}
        return {target.removeprefix("sglang.srt."): hook for target, (hook, _) in hooks.items()}

    return make


def refusal(instead):
    said = f"outrider: found SGLang 0.5.99, Outrider {__version__}: install SGLang {VERSIONS}, or "
    return re.escape(said + instead) + r"\Z"


@pytest.mark.parametrize("method", ["__post_init__", "resolve_once"])
def test_two_hooks_and_they_refuse(method, host, monkeypatch):
    arguments = with_method(method)
    hooks = host(ServerArgs=arguments, prepare_server_args=lambda argv: None)
    flags, made = "server_args.prepare_server_args", f"server_args.ServerArgs.{method}"
    assert set(hooks) == {flags, made}

    # a BEFORE hook that returns nothing leaves the arguments as they are
    assert hooks[flags](["--model-path", "m", "--speculative-algorithm", "NGRAM"]) is None
    assert hooks[made](arguments()) is None
    assert hooks[made](arguments("NGRAM")) is None

    out = refusal("leave --speculative-algorithm OUTRIDER out")
    with pytest.raises(SystemExit, match=out):
        hooks[flags](["--model-path", "m", "--speculative-algorithm", "OUTRIDER"])
    for name in ("OUTRIDER", "outrider"):
        with pytest.raises(SystemExit, match=out):
            hooks[made](arguments(name))
    monkeypatch.setenv("OUTRIDER_REPAIR", "rocm-sampling")
    with pytest.raises(SystemExit, match=refusal("unset OUTRIDER_REPAIR")):
        hooks[made](arguments("EAGLE"))


def test_a_struct_that_ignores_its_post_init_is_hooked_elsewhere(host):
    arguments = with_method("resolve_once")
    arguments.__post_init__ = lambda self: None
    assert set(host(ServerArgs=arguments)) == {"server_args.ServerArgs.resolve_once"}


@pytest.mark.parametrize(
    "contents",
    [{}, {"ServerArgs": type("ServerArgs", (), {})}, {"prepare_server_args": None}],
    ids=["nothing", "other methods", "no function"],
)
def test_another_shape_gets_no_hooks(contents, host):
    assert host(**contents) == {}


@pytest.mark.parametrize(
    ("argv", "is_chosen"),
    [
        (["--speculative-algorithm", "OUTRIDER"], True),
        (["--speculative-algorithm", "outrider", "--port", "1"], True),
        (["--port", "1", "--speculative-algorithm=OUTRIDER"], True),
        (["--speculative-algorithm", "EAGLE", "--speculative-algorithm", "OUTRIDER"], True),
        (["--speculative-algorithm", "OUTRIDER", "--speculative-algorithm", "EAGLE"], False),
        ([], False),
        (["--speculative-algorithm"], False),
        (["--speculative-algorithm=", "OUTRIDER"], False),
        (["--speculative-algorithm", "NGRAM"], False),
        (["--served-model-name", "OUTRIDER"], False),
        (["--served-model-name=OUTRIDER", "--attention-backend", "outrider"], False),
    ],
)
def test_chosen_by_flags(argv, is_chosen):
    assert guest.chosen_by(argv, "OUTRIDER") == is_chosen
