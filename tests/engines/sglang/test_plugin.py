"""A guest: off unless asked for, and out of the door if the house has changed."""

from __future__ import annotations

import inspect
import os
import pydoc
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang
from server import ENVIRONMENT
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from outrider import __version__
from outrider.core import Unsupported
from outrider.engines.sglang import plugin
from outrider.engines.sglang.arguments import settings
from outrider.engines.sglang.versions import contract
from outrider.serving.make_pool import make_pool
from outrider.serving.profile import Profile, load_profile, request_options

TINY = Path(__file__).parents[3] / "src" / "outrider" / "assets" / "tiny" / "target"


@pytest.fixture(autouse=True, scope="module")
def loaded():
    load_plugins()


def known_version():
    return plugin.installed_hooks().version


def hooks_of_all():
    hooks = plugin.installed_hooks()
    return hooks.table() | hooks.table(front=True)


def test_contract_holds_and_all_hooks_are_laid():
    assert contract.differences(known_version().contract) == []
    hooks = plugin.installed_hooks()
    laid = hooks.table() | hooks.table(front=True)
    assert laid.keys() == known_version().contract.HOOKS.keys()
    hooks.check_contract()
    hooks.check()


def misnamed(hook, kind, original):
    """Return the parameters of a function that its hook does not take by the same names."""
    taken = [*inspect.signature(hook).parameters.values()][kind != "BEFORE" :]
    original = getattr(original, "__func__", original)  # a class method takes its class
    theirs = [*inspect.signature(original).parameters]
    if theirs[:1] == ["self"]:  # never passed by name
        theirs[0] = taken[0].name
    named = [p.name for p in taken if p.kind == p.POSITIONAL_OR_KEYWORD]
    wrong = [name for name, ours in zip(theirs, named, strict=False) if name != ours]
    rest = {p.kind for p in taken} & {
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    }
    return wrong + (theirs[len(named) :] if len(rest) < 2 else [])


def test_hooks_take_what_they_wrap_by_name():
    """SGLang passes some arguments by name, in bare servers too."""
    wrong = {}
    for name, (hook, kind) in hooks_of_all().items():
        original = pydoc.locate(contract.hook_target(name))
        assert original is not None, name
        if kind != "REPLACE" and (found := misnamed(hook, kind, original)):
            wrong[name] = found
    assert not wrong


def test_twin_other_names_are_found():
    def original(self, logits, sampling_info):
        pass

    def renamed(original, self, logits, info):
        pass

    def short(result, self, *args):
        pass

    assert misnamed(renamed, "AROUND", original) == ["sampling_info"]
    assert misnamed(short, "AFTER", original) == ["logits", "sampling_info"]
    assert misnamed(lambda self, *args, **kwargs: None, "BEFORE", original) == []


@pytest.mark.parametrize(
    ("table", "name", "parameters", "said"),
    [
        ("HOOKS", "server_args.ServerArgs.no_such_method", "self", "is missing"),
        ("CALLS", "layers.sampler.multinomial_with_seed", "logprobs", "was (logprobs)"),
        ("NAMES", "managers.schedule_batch.NO_SUCH_REASON", "", "NO_SUCH_REASON is missing"),
        ("FIELDS", "managers.utils.GenerationBatchResult", "no_such_field", "lacks no_such_field"),
        ("ATTRIBUTES", "managers.schedule_batch.Req", "rid no_such_thing", "lacks no_such_thing"),
    ],
)
def test_twin_a_changed_host_is_seen(table, name, parameters, said, monkeypatch):
    known = known_version().contract
    if table == "NAMES":
        monkeypatch.setattr(known, table, (*known.NAMES, name))
    else:
        monkeypatch.setitem(getattr(known, table), name, parameters)
    assert any(said in line for line in contract.differences(known))
    version = sglang.__version__
    with pytest.raises(SystemExit, match=f"(?s)differs from the {version}.*found SGLang {version}"):
        plugin.installed_hooks().check_contract()


def test_a_version_with_the_same_names_would_be_served_and_one_changed_name_is_said(monkeypatch):
    """What a next version of SGLang meets: the adapter and the hooks of the newest one."""
    known = known_version().contract
    names = SimpleNamespace(**vars(known) | {"VERSION": "0.5.99"})
    monkeypatch.setattr(sglang, "__version__", "0.5.99")
    monkeypatch.setitem(contract.CONTRACTS, "0.5.99", names)
    made, hooks = plugin.HOOKS[known.VERSION]
    next_one = type("Sglang0599", (made,), {"contract": names})
    monkeypatch.setitem(plugin.HOOKS, "0.5.99", (next_one, hooks))
    plugin.installed_hooks().check_contract()
    monkeypatch.setattr(Req, "finished", lambda self, when: None)
    with pytest.raises(SystemExit) as stopped:
        plugin.installed_hooks().check_contract()
    assert str(stopped.value).splitlines() == [
        "outrider: this SGLang differs from the 0.5.99 that Outrider knows",
        "  - sglang.srt.managers.schedule_batch.Req.finished(self, when) was (self)",
        f"found SGLang 0.5.99, Outrider {__version__}: install SGLang 0.5.99 again: this one was "
        "changed, or leave --speculative-algorithm OUTRIDER out",
    ]


def test_another_version_is_not_known(monkeypatch):
    assert contract.known_contract() is known_version().contract
    monkeypatch.setattr(sglang, "__version__", "0.5.99")
    assert contract.known_contract() is None


def test_a_hook_that_was_not_laid_stops_the_server(monkeypatch):
    patched = HookRegistry._patched - {contract.hook_target("utils.common.support_triton")}
    monkeypatch.setattr(HookRegistry, "_patched", patched)
    with pytest.raises(SystemExit, match="support_triton"):
        plugin.check_hooks()


def prepared(model, *flags, first=""):
    """Return what became of a process that reads these flags as SGLang's server does."""
    flags = ["--model-path", str(model), "--device", "cpu", *flags]
    code = (
        f"import sglang; {first}\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        f"args = prepare_server_args([*{flags}, '--speculative-algorithm', 'OUTRIDER'])\n"
        "getattr(args, 'resolve_once', bool)()"  # from 0.5.20 on the server completes them later
    )
    environment = {**os.environ, **ENVIRONMENT}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_server_itself_stops_when_the_host_has_changed(model_dir):
    """The real command line, with an SGLang that says it is newer."""
    done = prepared(model_dir("stories15m"), first="sglang.__version__ = '0.5.99'")
    assert done.returncode == 1
    assert "found SGLang 0.5.99" in done.stderr
    assert "install SGLang 0.5.11 or 0.5.23" in done.stderr


def test_without_overlap(model_dir):
    """0.5.11 has another contract for it; 0.5.23 runs the same worker in turn."""
    done = prepared(model_dir("stories15m"), "--disable-overlap-schedule")
    refused = "--disable-overlap-schedule in SGLang 0.5.11; leave it out" in done.stderr
    assert refused == (sglang.__version__ == "0.5.11"), done.stderr[-1000:]
    assert done.returncode == refused, done.stderr[-1000:]


def test_off_unless_chosen():
    assert SpeculativeAlgorithm.from_string(None).is_none()
    assert SpeculativeAlgorithm.from_string("NGRAM").is_ngram()
    SamplingParams(custom_params={"outrider": "anything"}).verify(100)


def test_chosen():
    algorithm = SpeculativeAlgorithm.from_string("outrider")
    assert algorithm.name == "OUTRIDER"
    assert not algorithm.is_none()
    assert not algorithm.is_speculative()  # graphs are those of plain decoding


def arguments(**asked):
    default = {
        "page_size": 1,
        "speculative_num_steps": None,
        "speculative_num_draft_tokens": None,
        "speculative_draft_model_path": None,
        "speculative_eagle_topk": None,
        "enable_lora": False,
        "enable_mixed_chunk": False,
        "enable_return_hidden_states": False,
        "lora_paths": None,
        "disable_overlap_schedule": False,
        "attention_backend": None,
        "enable_deterministic_inference": False,
    }
    return SimpleNamespace(**{**default, **asked})


def test_steps_and_rows_that_differ_are_refused():
    asked = arguments(speculative_num_steps=3, speculative_num_draft_tokens=9)
    with pytest.raises(Unsupported, match="--speculative-num-steps 3"):
        settings.apply(asked)


@pytest.mark.parametrize(
    ("steps", "rows", "expected"), [(None, None, 24), (7, None, 7), (None, 6, 5), (0, None, 0)]
)
def test_sglangs_own_flags_say_how_many_drafts(steps, rows, expected):
    args = arguments(speculative_num_steps=steps, speculative_num_draft_tokens=rows)
    settings.apply(args)
    assert args.speculative_num_steps == expected
    assert args.speculative_num_draft_tokens == expected + 1
    assert not args.disable_overlap_schedule


@pytest.mark.parametrize(("drafter", "expected"), [("adaptive", 24), ("suffix", 4), ("ngram", 4)])
def test_control_has_room(drafter, expected, profile, monkeypatch):
    for name, path in profile(drafter=drafter).items():
        monkeypatch.setenv(name, path)
    args = arguments()
    settings.apply(args)
    assert args.speculative_num_steps == expected


@pytest.mark.parametrize(("steps", "expected"), [(None, 7), (9, 9), (7, 7)])
def test_the_profile_says_how_many_drafts(steps, expected, profile, monkeypatch):
    for name, path in profile(max_drafts=7).items():
        monkeypatch.setenv(name, path)
    args = arguments(speculative_num_steps=steps)
    settings.apply(args)
    assert args.speculative_num_steps == expected
    with pytest.raises(Unsupported, match=r"max_drafts 7 with --speculative-num-steps 6"):
        settings.apply(arguments(speculative_num_draft_tokens=7))


def test_a_head_of_fixed_depth_says_how_many_drafts(profile, monkeypatch):
    heads = {"code": {"path": str(TINY.parent / "head"), "depth": 6}}
    for name, path in profile(drafter="suffix", drafters=heads).items():
        monkeypatch.setenv(name, path)
    args = arguments()
    settings.apply(args)
    assert args.speculative_num_steps == 6
    with pytest.raises(Unsupported, match=r"'code' of depth 6 with at most 5 drafts"):
        settings.apply(arguments(speculative_num_steps=5))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("drafter: [1]", "drafter"),
        ("no_such_key: 1", "no_such_key"),
        ("draft_timeout: 0", "draft_timeout"),
        ("draft_timeout: '1'", "draft_timeout"),
        ("flush_tokens: 0", "flush_tokens"),
        ("max_drafts: -1", "max_drafts"),
        ("drafters: {ngram: 3}", "ngram"),
        ("}", "cannot be read"),
    ],
)
def test_profile_is_strict(content, said, tmp_path):
    path = tmp_path / "profile.yaml"
    path.write_text(content)
    with pytest.raises(Unsupported, match=said):
        load_profile(str(path))


def test_profile(tmp_path, monkeypatch):
    path = tmp_path / "profile.yaml"
    path.write_text("drafter: ngram\ndrafters:\n  ngram: {min_n: 1}\n")
    monkeypatch.setenv("OUTRIDER_CONFIG", str(path))
    assert load_profile().drafters == {"ngram": {"min_n": 1}}
    assert load_profile().names("model") == ["ngram", "model", "none"]
    other = tmp_path / "other.yaml"
    other.write_text("drafter: model\n")
    monkeypatch.setenv("OUTRIDER_CONFIG", str(other))
    with pytest.raises(Unsupported, match="speculative-draft-model-path"):
        settings.apply(arguments())


def test_control_is_the_default():
    """It alone may decode plainly where drafts do not pay. A request may name the others."""
    assert Profile().drafter == "adaptive"
    assert Profile().names("model") == ["adaptive", "ngram", "model", "none"]
    names = Profile().names(None)
    assert names == ["adaptive", "ngram", "none"]
    assert make_pool(Profile(), names, vocab_size=9).control is not None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("drafter: sufix", "'sufix'; choose one of"),
        ("drafters: {suffix: {depth: 3}}", "depth"),
        ("drafters: {adaptive: {margn: 0.1}}", "margn"),
        ("drafters: {adaptive: {limits: 5}}", "limits"),
    ],
)
def test_drafters_are_checked_before_anything_is_loaded(content, said, tmp_path, monkeypatch):
    (tmp_path / "profile.yaml").write_text(content)
    monkeypatch.setenv("OUTRIDER_CONFIG", str(tmp_path / "profile.yaml"))
    with pytest.raises(Unsupported, match=said):
        settings.apply(arguments())


def test_drafters_of_other_packages_are_not_made(tmp_path, monkeypatch):
    (tmp_path / "profile.yaml").write_text("drafters: {raising: {no_such_option: 1}}")
    monkeypatch.setenv("OUTRIDER_CONFIG", str(tmp_path / "profile.yaml"))
    settings.apply(arguments())  # the worker makes them, where they may need its device


def test_a_draft_model_of_another_family_is_refused(model_dir):
    paths = {"model_path": str(TINY), "tokenizer_path": None, "trust_remote_code": False}
    for path, said in ((model_dir("stories15m"), "differs"), ("no/such/model", "no/such/model")):
        with pytest.raises(Unsupported, match=said):
            settings.apply(arguments(**paths, speculative_draft_model_path=str(path)))


@pytest.mark.parametrize(
    ("content", "flags", "said"),
    [
        ("drafter: sufix", [], "drafter 'sufix'; choose one of"),
        ("{}", ["--speculative-accept-threshold-single", "0.3"], "--speculative-accept-threshold-"),
    ],
)
def test_what_is_wrong_is_the_last_line(content, flags, said, launch, tmp_path):
    (tmp_path / "profile.yaml").write_text(content)
    flags = ["--speculative-algorithm", "OUTRIDER", *flags]
    environment = {"OUTRIDER_CONFIG": str(tmp_path / "profile.yaml")}
    server = launch("misspelt", TINY, *flags, plain=True, **environment)
    assert server.process.wait(120) == 1
    *_, last = server.log.read_text().splitlines()
    assert last.startswith(f"outrider: {said}")
    assert "Load weight" not in server.log.read_text()


def test_bits_are_those_of_a_draft_model(tmp_path, monkeypatch):
    (tmp_path / "profile.yaml").write_text("draft_bits: 4\n")
    monkeypatch.setenv("OUTRIDER_CONFIG", str(tmp_path / "profile.yaml"))
    with pytest.raises(Unsupported, match="draft_bits 4 without a draft model"):
        settings.apply(arguments())


def test_request_options():
    names = ["ngram", "none"]
    assert request_options(None, names).max_drafts is None
    assert request_options({"outrider": {"max_drafts": 3}}, names).max_drafts == 3
    assert request_options({"outrider": {"drafter": "none"}}, names).drafter == "none"
    assert request_options({"outrider": {"explain": True}}, names).explain
    with pytest.raises(ValueError, match="does not report acceptance"):
        request_options({"outrider": {"explain": True}}, names, reports=False)
    for wrong in ({"max_drafts": -1}, {"max_drafts": True}, {"drafter": "model"}, {"k": 1}, [], 1):
        with pytest.raises(ValueError, match=r"custom_params\.outrider"):
            request_options({"outrider": wrong}, names)
