"""With Outrider installed: any SGLang runs as without it; one that is not known refuses OUTRIDER.

scripts/setup-sglang-beside makes those versions; $OUTRIDER_SGLANG18 and $OUTRIDER_SGLANG23 name
their directories.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from server import CPU, ENVIRONMENT

from outrider import __version__

BESIDE = {"0.5.18": "OUTRIDER_SGLANG18", "0.5.23": "OUTRIDER_SGLANG23"}
FLAGS = [
    *("--attention-backend", "torch_native", "--mem-fraction-static", "0.1"),
    *("--max-total-tokens", "4096", "--max-running-requests", "8", "--random-seed", "1"),
]
PROMPTS = ["On a misty morning, an outrider rode out of Harrow.", "The mill", "She said that"]
EACH_TIME_ANOTHER = {"port", "launch_command", "startup_time", "internal_states"}
REFUSAL = (
    r"outrider: found SGLang {}, Outrider {}: install SGLang 0\.5\.11 or 0\.5\.23, "
    r"or leave --speculative-algorithm OUTRIDER out"
)


def environment(version):
    """Return what makes a process use this version, or skip the test."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if version in BESIDE:
        folder = os.environ.get(BESIDE[version])
        if folder is None:
            pytest.skip(f"no SGLang {version}: ${BESIDE[version]} names none")
        paths.insert(0, folder)
    return {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}


def behaviour(server):
    """Return the server's settings, and its answers without times and ids."""
    info = server.ask_for("/get_server_info")
    settings = {name: value for name, value in info.items() if name not in EACH_TIME_ANOTHER}
    answers = []
    for prompt in PROMPTS:
        sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
        body = {"text": prompt, "sampling_params": sampling, "return_logprob": True}
        answer = server.ask("/generate", body)
        meta = answer["meta_info"]
        assert len(answer["output_ids"]) == 32
        kept = ("finish_reason", "prompt_tokens", "completion_tokens", "output_token_logprobs")
        answers.append((answer["text"], answer["output_ids"], [meta[name] for name in kept]))
        assert not [name for name in meta if name.startswith(("spec_", "outrider"))]
    return settings, answers


@pytest.mark.parametrize("version", ["0.5.11", *BESIDE])
def test_not_chosen_nothing_changes(version, launch, model_dir):
    seen = []
    for plugins in ("none", "outrider"):
        options = {"SGLANG_PLUGINS": plugins, **environment(version)}
        name, model = f"guest-{version}-{plugins}", model_dir("tiny-target")
        with launch(name, model, *FLAGS, plain=True, **options) as s:
            seen.append(behaviour(s))
        log = s.log.read_text(errors="replace")
        assert not re.search(r"Failed to (load|execute|apply)", log), s.tail()
    (settings, answers), (settings_with, answers_with) = seen
    assert settings["version"] == version
    assert settings_with == settings
    assert answers_with == answers


# our own flags too, in a server that does not know them; a model that is not there is not missed
MODEL = ["--model-path", "no/such/model"]
CHOSEN = ["--speculative-algorithm", "OUTRIDER", "--attention-backend", "outrider"]
ENGINE = "import sglang; sglang.Engine(model_path='no/such/model', device='cpu', {})"


@pytest.mark.parametrize("version", ["0.5.18"])
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "sglang.launch_server", *MODEL, *CPU, *CHOSEN],
        ["-c", ENGINE.format("speculative_algorithm='OUTRIDER'")],
    ],
    ids=["server", "engine"],
)
def test_chosen_without_a_contract_is_refused(version, command):
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **ENVIRONMENT, **environment(version)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 1, done.stdout[-2000:]
    refusal = REFUSAL.format(re.escape(version), re.escape(__version__))
    assert re.fullmatch(refusal, done.stdout.splitlines()[-1]), done.stdout[-2000:]
    assert "no/such/model" not in done.stdout
