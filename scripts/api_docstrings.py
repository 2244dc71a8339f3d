"""Docstrings for the API reference (an extension of griffe; see mkdocs.yml).

Our docstrings describe arguments and attributes in paragraphs of `name: what it is` lines. Here
such lines become the sections `Args:` and `Attributes:` that griffe reads.
"""

import re

import griffe

ENTRY = re.compile(r"^(\w+(?:, \w+)*): (.*(?:\n {4,}.*)*)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites the docstring of every function and class."""

    def on_function(self, *, func, **kwargs):
        rewrite(func, func)

    def on_class(self, *, cls, **kwargs):
        rewrite(cls, cls)


def rewrite(described, owner):
    """Turn the paragraphs that describe a function's or a class's names into sections."""
    if described.docstring is None:
        return
    arguments = {parameter.name.lstrip("*") for parameter in owner.parameters}
    attributes = set(owner.members) - arguments
    paragraphs = [
        sections(paragraph, {"Args": arguments, "Attributes": attributes})
        for paragraph in described.docstring.value.split("\n\n")
    ]
    described.docstring.value = "\n\n".join(paragraphs)
    described.docstring.parser = griffe.Parser.google


def sections(paragraph, kinds):
    """Return a paragraph as sections if all of it are entries with known names, else as it is."""
    entries = ENTRY.findall(paragraph)
    names = [name for many, _ in entries for name in many.split(", ")]
    if (
        ENTRY.sub("", paragraph).strip()
        or not names
        or not set(names) <= set().union(*kinds.values())
    ):
        return paragraph
    found = dict.fromkeys(kinds, "")
    for many, text in entries:
        text = re.sub(r"\s*\n\s*", " ", text)
        for name in many.split(", "):
            kind = next(kind for kind, known in kinds.items() if name in known)
            found[kind] += f"\n    {name}: {text}"
    return "\n\n".join(f"{kind}:{body}" for kind, body in found.items() if body)
