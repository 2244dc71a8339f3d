"""A secret is found by the name beside it, by its form, or because this process was given it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import redact as module
from outrider.clients.process import serving
from outrider.errors import Unsupported, UsageError, reading
from outrider.redact import HIDDEN, hide, is_secret, quoted, redact, redact_args, redact_value

SECRETS = (
    *("api-key", "--admin-api-key", "ssl_keyfile_password", "OPENAI_API_KEY", "apiKey", "HFTOKEN"),
    *("X-Api-Key", "Authorization", "hf_token", "AWS_SECRET_ACCESS_KEY", "passwd", "credentials"),
    *("watermark_key_b", "client_secret", "oauth", "auth", "DB_PWD", "passphrase", "api_keys"),
)
HARMLESS = (
    *("max_tokens", "num-draft-tokens", "tokenizer_path", "seconds_per_token", "ssl_keyfile"),
    *("speculative_token_map", "keyboard", "author", "PWD", "OLDPWD", "TOKENIZERS_PARALLELISM"),
    *("bucket_time_to_first_token", "kt_max_deferred_experts_per_token", "tokens", "cache_salt"),
)


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets(name):
    assert is_secret(name)


@pytest.mark.parametrize("name", HARMLESS)
def test_other_names(name):
    assert not is_secret(name)


def test_flags_of_sglang():
    """Of all flags of both versions, those that hold a secret; the table is checked by them."""
    sys.path.insert(0, str(Path(__file__).parent / "engines" / "sglang"))
    from flag_table import PASSED

    from outrider.engines.sglang.arguments.flags import REFUSED

    names = [name for group in PASSED.values() for name in group.split()]
    names += [name for refusal in REFUSED for name in refusal.fields]
    hidden = {n for n in names if HIDDEN in redact_args([f"--{n.replace('_', '-')}", "value"])}
    # --ssl-keyfile is a path, and the beginning of a secret's name
    known = {"api_key", "admin_api_key", "ssl_keyfile_password", "ssl_keyfile", "watermark_config"}
    assert hidden == known & {*names}
    assert {"api_key", "admin_api_key", "ssl_keyfile_password"} <= hidden


def both(secret, *forms):
    return [pytest.param(form.format(s=secret), id=form) for form in forms]


@pytest.mark.parametrize(
    "text",
    both(
        "hunter2!",
        "--api-key {s} --tp 2",
        "--api-key={s}",
        "--api-k {s}",
        "--apikey {s}",
        "--api-kye {s}",
        "['--api-key', '{s}', '--tp', '2']",
        "ServerArgs(model_path='m', api_key='{s}', tp=2)",
        'ServerArgs(api_key=None, ssl_keyfile_password="{s}")',
        "api_key: {s}",
        "-H 'Authorization: Bearer {s}'",
        "Authorization: Basic {s}",
        "X-Api-Key: {s}",
        "{{'Authorization': 'Bearer {s}'}}",
        "MY_TOKEN={s} outrider",
        "http://h:1/v1?x=1&access_token={s}&y=2",
        "http://h#api_key={s}",
        "http://me:{s}@h:1/v1",
        "http://{s}@h:1",
        "http://me:a/{s}@h:1",
        "no server at 'http://me:{s}@h' (refused)",
        '{{"a": {{"api_key": "{s}"}}}}',
        '{{"credentials": {{"user": "{s}"}}}}',
        '["--api-key", "{s}"]',
        'cut {{"api_key": "{s}',
        r"x {{\"api_key\": \"{s}\"}} y",
        "asked with Bearer {s}-and-more",
    ),
)
def test_a_secret_in_text(text):
    assert "hunter2" not in redact(text)
    assert HIDDEN in redact(text)
    # what stands after it is still there
    for rest in ("--tp 2", "tp=2", "y=2", "@h:1", " y", "(refused)", "outrider"):
        if text.endswith(rest):
            assert redact(text).endswith(rest)


@pytest.mark.parametrize(
    "text",
    [
        "'http://h#max_drafts=-4' names no engine; use a server's address, http://host:port",
        "write key=value,key=value",
        "http://h wants a key; set OPENAI_API_KEY to it",
        "no token can follow: the logits are NaN",
        "token 5: 'a' became 'b', margin 0.1",
        "max_new_tokens=5, api_key=None",
        "mail me@h, or see http://h:1/a@b?mail=me@h",
        "--max-total-tokens 4096 --tokenizer-path /m",
        '{"max_tokens": 5, "mode": "x"',
    ],
)
def test_other_texts_stay(text):
    assert redact(text) == text


def test_a_command():
    nested = json.dumps({"a": [{"hf_token": "n", "n": 1}]})
    found = redact_args(
        ["audit", "http://u:p@h", "--api-key", "a", "--x=1", "--api-keys", "b", "c", "--tp", "2",
         "--override", nested, f"--override={nested}", "-H", "Authorization: Bearer d", "A_KEY=e"]
    )  # fmt: skip
    clean = json.dumps({"a": [{"hf_token": HIDDEN, "n": 1}]})
    assert found == [
        *("audit", "http://***@h", "--api-key", HIDDEN, "--x=1", "--api-keys", HIDDEN, HIDDEN),
        *("--tp", "2", "--override", clean, f"--override={clean}"),
        *("-H", f"Authorization: {HIDDEN}", f"A_KEY={HIDDEN}"),
    ]


def test_plain_values():
    value = {"api_key": "a", "auth": ["b"], "token": None, "n": 1, "flags": ["--api-key", "c"]}
    hidden = {"api_key": HIDDEN, "auth": HIDDEN, "token": None, "n": 1}
    assert redact_value(value) == {**hidden, "flags": ["--api-key", HIDDEN]}


@pytest.mark.parametrize("raised", [Unsupported, UsageError])
def test_errors(raised):
    error = raised("no server at http://me:hunter2@h", fix="leave --api-key hunter2 out")
    assert "hunter2" not in f"{error} {error.what} {error.fix}"


def test_a_secret_that_is_cut_off():
    """What is cut to fit into a message has lost what follows its secret."""
    url = f"http://me:{'hunter2' * 50}@h"
    assert "hunter2" in redact(f"{url!r:.200}")
    assert "hunter2" not in quoted(url)
    with pytest.raises(Unsupported) as caught, reading("it", fix="no"):
        raise ValueError(url)
    assert "hunter2" not in str(caught.value)


# -- what this process was given


@pytest.fixture
def process(monkeypatch):
    """Return a function that sets this process's command line and environment."""

    def be(*args, **variables):
        monkeypatch.setattr("sys.argv", ["outrider", *args])
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return be


@pytest.mark.parametrize(
    "said",
    ["{s}", "a {s}b", '{{"x": "{s}"}}', "http://h/?q={q}", "<p>{h}</p>", "as Basic {b}", "{r}"],
)
def test_an_echo_of_what_we_were_given(process, said):
    secret = "it's <a> \"secret\\ "
    process("audit", f"http://me:{secret}@h")
    forms = {"s": secret, "q": "it%27s%20%3Ca%3E%20%22secret%5C%20", "r": repr(secret)}
    forms |= {"h": "it&#x27;s &lt;a&gt; &quot;secret\\ "}
    forms |= {"b": "bWU6aXQncyA8YT4gInNlY3JldFwg"}
    found = hide(said.format(**forms))
    assert "secret" not in found
    assert HIDDEN in found
    assert forms["b"] not in found


def test_variables(process, tmp_path):
    process(SOME_TOKEN="a-long-secret", OPENAI_API_KEY="EMPTY", OTHER="not-a-secret-at-all")
    assert hide("a-long-secret EMPTY not-a-secret-at-all") == f"{HIDDEN} EMPTY not-a-secret-at-all"
    process(SOME_CREDENTIALS=str(tmp_path))
    assert hide(str(tmp_path)) == str(tmp_path)


def test_a_short_secret_is_hidden_as_a_word(process):
    process("audit", "http://me:test@h")
    assert hide("the latest test") == f"the latest {HIDDEN}"


@given(st.text(max_size=300))
def test_any_text(text):
    """Nothing raises, and what is clean is left alone the second time."""
    assert hide(hide(text)) == hide(text)
    redact(text)
    redact_args([text, text])


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "://a:b",
        "://a:@",
        "\\",
        "a-",
        "--a ",
        "&",
        "a=",
        "'a':",
        " ",
        "{",
        "[",
        '"',
        "a-b:",
        "api_key='",
    ],
)
def test_time_is_in_proportion(piece):
    """A server may say very much: four times as much may not take sixteen times as long."""

    def seconds(count):
        text, times = piece * count, []
        for _ in range(3):
            started = time.process_time()
            redact(text)
            times.append(time.process_time() - started)
        return min(times)

    assert seconds(40_000) < 10 * seconds(10_000) + 0.05


def test_a_log_has_no_secrets(tmp_path):
    """A server says its arguments, and then ends: that they were written is awaited."""
    said = (
        'ServerArgs(api_key=\'hunter2\', tp_size=2)\n{"hf_token": "hunter2"}\nand more, tp_size=2'
    )
    code = [sys.executable, "-c", f"print({said!r}); raise SystemExit(1)"]
    with pytest.raises(Unsupported, match="tp_size=2"), serving(code, tmp_path / "log"):
        pass
    clean = said.replace("hunter2", HIDDEN)
    assert (tmp_path / "log").read_text() == f"{clean}\n"


def test_twin_a_process_without_secrets_leaves_an_echo(process, monkeypatch):
    process("audit", "http://me:a-secret-password@h")
    assert hide("a-secret-password") == HIDDEN
    monkeypatch.setattr(module, "_known", lambda args, variables: ((), None))
    assert hide("a-secret-password") == "a-secret-password"
