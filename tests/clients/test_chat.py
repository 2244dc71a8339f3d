"""Chat templates are programs by others: they are ended when they loop or fill the memory."""

from __future__ import annotations

import os
import time

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("jinja2")

from outrider.clients import chat, load_tokenizer
from outrider.errors import Unsupported

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "Is the road clear? \u00e9\U0001f40e"}]


@pytest.fixture
def render(model_dir):
    """Return a function that renders with a template."""

    def with_template(template: str) -> str:
        tokenizer = load_tokenizer(str(model_dir("tiny-target")))
        tokenizer.chat_template = template
        return chat.render_chat(tokenizer, MESSAGES)

    return with_template


def test_a_template(render):
    template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}{% endfor %}"
    more = "{% if add_generation_prompt %} <assistant>{% endif %}"
    assert render(template + more) == f"<user> {MESSAGES[0]['content']} <assistant>"


@pytest.mark.parametrize("template", [LOOP, "{{ 'x' }}" + LOOP])
def test_a_template_that_loops_is_ended(render, monkeypatch, template):
    monkeypatch.setattr(chat, "DEADLINE", 0.5)
    began = time.monotonic()
    with pytest.raises(Unsupported, match="a chat template that takes over"):
        render(template)
    assert time.monotonic() - began < 60
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # no process is left


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 'x' * 10**10 }}", "fails"),
        ("{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}"
         "{% endfor %}{{ n.x }}", "fails"),
        ("{{ 'x' * 10**7 }}", "writes over 8,388,608 bytes"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "writes over 8,388,608 bytes"),
        ("{{ raise_exception('not\nso') }}", "not so"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "fails"),
    ],
)  # fmt: skip
def test_a_template_that_fails_or_writes_too_much(render, template, said):
    with pytest.raises(Unsupported, match=said) as refused:
        render(template)
    assert "\n" not in str(refused.value)


def test_a_template_that_crashes_the_process_is_told(monkeypatch):
    class Tokenizer:
        def apply_chat_template(self, *args, **more):
            os._exit(1)

    with pytest.raises(Unsupported, match="it crashed"):
        chat.render_chat(Tokenizer(), MESSAGES)
