"""The drafts of a step as a picture: the kept path straight ahead, what was rejected below it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from html import escape

from rich.cells import cell_len

from outrider.explain.label import label
from outrider.explain.walk import ROOT, WalkStep

__all__ = ["picture"]

CELL = 7.8
"""Width of a character, in pixels, at the page's 13 px."""

HEIGHT, LANE, GAP, PAD, MARGIN, BEND, STUB = 26, 34, 20, 6, 2, 5, 9


@dataclass
class _Node:
    """A place in the picture. kind: root, accepted, rejected, unreached, or own."""

    name: str
    kind: str
    parent: int
    x: float = MARGIN
    lane: int = 0
    children: list[int] = field(default_factory=list)

    @property
    def end(self) -> float:
        """Where it ends, in pixels."""
        return self.x + max(1, cell_len(self.name)) * CELL + 2 * PAD

    @property
    def trunk(self) -> float:
        """Where its branches leave the line."""
        return self.end + GAP - STUB

    @property
    def y(self) -> float:
        """Of its middle."""
        return MARGIN + self.lane * LANE + HEIGHT / 2


def picture(step: WalkStep, root: str) -> str:
    """Return the SVG of a step. root: the text of the token before it."""
    nodes = _layout(step, root)
    width = max(node.end for node in nodes) + MARGIN
    height = max(node.y for node in nodes) + HEIGHT / 2 + MARGIN
    parts = [
        f'<svg class="tree" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(_words(step))}">'
    ]
    # what was kept is drawn last: it lies on top
    for node in sorted(nodes, key=lambda node: node.kind in ("accepted", "own")):
        if node.parent != ROOT:
            parts.append(_edge(nodes[node.parent], node))
    parts += [_pill(node) for node in nodes]
    return "".join([*parts, "</svg>"])


def _layout(step: WalkStep, root: str) -> list[_Node]:
    """Place the root, the drafts and the target's own token: each after its parent."""
    nodes = [_Node(label(root), "root", ROOT)]
    nodes += [_Node(label(one.text), one.fate, one.parent + 1) for one in step.drafts]
    if step.own is not None:
        last = next((e.draft for e in reversed(step.emitted) if e.draft is not None), ROOT)
        nodes.append(_Node(label(step.own.text), "own", last + 1))
    for i, node in enumerate(nodes[1:], 1):
        parent = nodes[node.parent]
        node.x = parent.end + GAP
        parent.children.append(i)
        # what goes on in its parent's lane stands first
        parent.children.sort(key=lambda child: nodes[child].kind not in ("accepted", "own"))
    _Lanes(nodes).place(0, 0)
    return nodes


class _Lanes:
    """Gives each run of nodes the highest lane in which it touches nothing else."""

    def __init__(self, nodes: list[_Node]) -> None:
        self._nodes = nodes
        self._taken: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)

    def place(self, first: int, lane: int) -> None:
        """Place a run and all that leaves it, what leaves last first: so lines do not cross."""
        run = self._run(first)
        for node in run:
            node.lane = lane
        self._taken[lane].append(self._room(run))
        for node in reversed(run):
            for child in node.children[1:]:
                self.place(child, self._free(child, node.trunk, lane))

    def _room(self, run: list[_Node]) -> tuple[float, float]:
        """Return where a run starts and ends, with the bend that leads there and some air."""
        return run[0].x - STUB - 2, run[-1].end + 3

    def _run(self, first: int) -> list[_Node]:
        """Return a node, its first child, that one's, and so on."""
        run = [self._nodes[first]]
        while run[-1].children:
            run.append(self._nodes[run[-1].children[0]])
        return run

    def _free(self, first: int, trunk: float, above: int) -> int:
        """Return a lane for a run that leaves at this trunk, and keep the way there free."""
        run, lane = self._run(first), above + 1
        while self._meets(lane, *self._room(run)):
            self._taken[lane].append((trunk, trunk))
            lane += 1
        return lane

    def _meets(self, lane: int, start: float, end: float) -> bool:
        return any(a < end and start < b for a, b in self._taken[lane])


def _edge(start: _Node, end: _Node) -> str:
    x, y, trunk = start.end, start.y, start.trunk
    if start.lane == end.lane:
        way = f"M{x:.1f} {y:.1f}H{end.x:.1f}"
    else:
        way = f"M{trunk:.1f} {y:.1f}V{end.y - BEND:.1f}"
        way += f"Q{trunk:.1f} {end.y:.1f} {trunk + BEND:.1f} {end.y:.1f}H{end.x:.1f}"
    return f'<path class="e-{end.kind}" d="{way}"/>'


def _pill(node: _Node) -> str:
    y = node.y - HEIGHT / 2
    return (
        f'<g class="n-{node.kind}"><rect x="{node.x:.1f}" y="{y:.1f}" '
        f'width="{node.end - node.x:.1f}" height="{HEIGHT}" rx="7"/>'
        f'<text x="{(node.x + node.end) / 2:.1f}" y="{node.y + 4.5:.1f}">'
        f"{escape(node.name)}</text></g>"
    )


def _words(step: WalkStep) -> str:
    """Return the picture in words."""
    said = ["drafts: " + ", ".join(f"{label(one.text)} {one.fate}" for one in step.drafts)]
    if not step.drafts:
        said = ["no drafts"]
    if step.own is not None:
        said.append(f"the target's own token: {label(step.own.text)}")
    return "; ".join(said)
