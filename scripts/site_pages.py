"""Pages of the site that lie elsewhere in the repository (a hook of mkdocs; see mkdocs.yml).

Pages link to files of the repository as they do on any forge: `../SECURITY.md`. Of these, what is
written for readers becomes a page of the site, and source becomes a page that shows it.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
PAGES = {
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
KERNEL = re.compile(r"src/outrider/kernels/(\w+)/README\.md")

_origins = {}  # of each generated page: the file that it shows


def on_files(files, config):
    """Add the pages outside of docs/ that others link to, and those that these link to."""
    _origins.clear()
    waiting = [*PAGES]
    for file in files.documentation_pages():
        waiting += _linked(_origin(file.src_uri), Path(file.abs_src_path).read_text())
    while waiting:
        path = waiting.pop()
        uri = _uri(path)
        if uri in _origins or not (ROOT / path).is_file():
            continue
        _origins[uri] = path
        text = (ROOT / path).read_text()
        level = InclusionLevel.INCLUDED if path in PAGES else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, content=_content(path, text), inclusion=level))
        if path.endswith(".md"):
            waiting += _linked(path, text)
    return files


def on_page_markdown(markdown, page, config, files):
    """Point links out of a page's folder to where their targets are in the site."""
    here = page.file.src_uri
    origin = _origin(here)

    def point(match):
        target = _resolve(origin, match[1])
        inside = target.removeprefix("docs/") if target.startswith("docs/") else _uri(target)
        if files.get_file_from_path(inside) is None:
            return match[0]  # mkdocs says what is wrong with it
        return f"]({posixpath.relpath(inside, posixpath.dirname(here) or '.')}"

    return LINK.sub(point, markdown)


def _origin(uri):
    return _origins.get(uri, f"docs/{uri}")


def _resolve(origin, link):
    return os.path.normpath(posixpath.join(posixpath.dirname(origin), link))


def _linked(origin, text):
    """Return the files outside of docs/ that a page links to."""
    found = (_resolve(origin, match[1]) for match in LINK.finditer(text))
    return [path for path in found if not path.startswith(("docs/", ".."))]


def _uri(path):
    """Return where in the site a file of the repository is shown."""
    if kernel := KERNEL.fullmatch(path):
        return f"kernels/{kernel[1]}.md"
    return PAGES.get(path) or f"source/{path}.md"


def _content(path, text):
    if path.endswith(".md"):
        return text
    language = Path(path).suffix.removeprefix(".") or "text"
    return f"---\nsearch: {{exclude: true}}\n---\n# `{path}`\n\n````{language}\n{text}````\n"
