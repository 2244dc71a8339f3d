"""The public names are there, typed, described, and on the page of the API reference."""

from __future__ import annotations

import inspect
import re

import pytest

import outrider
from pages import PAGES, ROOT, blocks

NAMES = sorted(set(outrider.__all__) - {"__version__"})
PAGE = (ROOT / "docs" / "api.md").read_text()
# a docstring's lines `name: what it is`, or `name, name: what they are`
ENTRY = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)


def described(thing) -> set[str]:
    found = ENTRY.findall(inspect.getdoc(thing))
    return {name for names in found for name in names.split(", ")}


def test_the_page_has_every_public_name_and_no_other():
    assert sorted(re.findall(r"^::: outrider\.(\w+)$", PAGE, re.MULTILINE)) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_described_with_its_arguments(name):
    thing = getattr(outrider, name)
    assert len(inspect.getdoc(thing)) > 40
    if name in ("Drafter", "stream"):  # a protocol; and what has the arguments of `generate`
        return
    parameters = inspect.signature(thing).parameters.values()
    assert {p.name for p in parameters if not p.name.startswith("_")} <= described(thing)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("Drafter", "custom_generate")])
def test_no_argument_passes_unnamed(name):
    """`**options` would take a misspelt one; Transformers calls `custom_generate` with its own."""
    parameters = inspect.signature(getattr(outrider, name)).parameters.values()
    assert not [p for p in parameters if p.kind is p.VAR_KEYWORD]
    assert all(p.annotation is not p.empty for p in parameters)


def test_stream_has_the_arguments_of_generate():
    generate, stream = map(inspect.signature, (outrider.generate, outrider.stream))
    assert generate.parameters == stream.parameters


def test_pages_import_public_names_from_the_top_level():
    code = [b.body for page in PAGES for b in blocks(page.read_text()) if b.language == "python"]
    imports = re.findall(r"^from outrider[.\w]+ import (.+)$", "\n".join(code), re.MULTILINE)
    assert not {name for names in imports for name in names.split(", ")} & {*NAMES}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        outrider.generat  # noqa: B018
