"""Writes deploy/grafana/outrider.json: `python scripts/make_dashboard.py`. Edit here, not there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "deploy" / "grafana" / "outrider.json"
MODEL, SERVER = 'model_name=~"$model_name"', 'instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Panel = dict[str, Any]


def chosen(name: str, *matches: str) -> str:
    """Return the series of a metric that match.

    On its way to Prometheus 2, the colon of a name may become an underscore (as prometheus_client
    writes OpenMetrics): both are meant.
    """
    return "{" + ", ".join([f'__name__=~"outrider[:_]{name}"', *matches]) + "}"


def counter(name: str) -> str:
    """Return the series of a counter, of what was chosen above the panels."""
    return chosen(f"{name}_total", MODEL, SERVER)


def per_second(name: str, by: str = "") -> str:
    """How fast a counter grows, at a point of a curve; summed, or by a label."""
    total = f" by ({by}) " if by else ""
    return f"sum{total}(rate({counter(name)}[$__rate_interval]))"


def ratio(name: str, other: str, by: str = "") -> str:
    """One growth over another, at a point of a curve."""
    return f"{per_second(name, by)} / {per_second(other, by)}"


def in_all(name: str, other: str) -> str:
    """One growth over another, in the time that the dashboard shows."""
    return " / ".join(f"sum(increase({counter(n)}[$__range]))" for n in (name, other))


SPEED_UP = (
    "What plain steps would have taken for the same tokens, over what the steps took. How long a "
    "plain step takes is measured on steps without drafts; else it is adaptive's estimate; where "
    "there is neither, nothing is counted."
)
STATS = [  # title, unit, query, what it means
    (
        "Speed-up against plain",
        "none",
        in_all("plain_seconds", "compared_seconds"),
        SPEED_UP,
    ),
    (
        "Time that it speaks of",
        "percentunit",
        in_all("compared_seconds", "step_seconds"),
        "The share of decode time in which a plain step's time is known for that many requests.",
    ),
    (
        "Tokens a request and step",
        "none",
        in_all("emitted_tokens", "request_steps"),
        "1 is plain decoding. SGLang's spec_accept_length.",
    ),
    (
        "Drafts accepted",
        "percentunit",
        in_all("accepted_draft_tokens", "draft_tokens"),
        "Of all drafts; those behind a rejected one count as rejected.",
    ),
]


def curves(
    title: str, description: str, *queries: tuple[str, str], unit: str = "none", stack: str = ""
) -> Panel:
    """A panel of curves. queries: with the names of their curves; stack: normal or percent"""
    custom: dict[str, Any] = {"drawStyle": "line", "fillOpacity": 40 if stack else 0}
    if stack:
        custom["stacking"] = {"mode": stack, "group": "A"}
    defaults = {"unit": unit, "min": 0, "custom": custom}
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return _panel("timeseries", title, description, defaults, options, queries)


def stat(title: str, unit: str, query: str, description: str) -> Panel:
    """A panel of one number."""
    options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "none"}
    defaults = {"unit": unit, "decimals": 2 if unit == "none" else 0}
    panel = _panel("stat", title, description, defaults, options, [(query, "")])
    panel["targets"][0] |= {"instant": True, "range": False}
    return panel


def heatmap(title: str, description: str, histogram: str) -> Panel:
    """A panel that shows how a histogram changes."""
    buckets = chosen(f"{histogram}_bucket", MODEL, SERVER)
    query = f"sum by (le) (increase({buckets}[$__rate_interval]))"
    options = {
        "calculate": False,
        "color": {"mode": "scheme", "scheme": "Blues", "steps": 32},
        "yAxis": {"axisLabel": "drafts, at most"},
        "tooltip": {"mode": "single", "yHistogram": True},
    }
    panel = _panel("heatmap", title, description, {}, options, [(query, "{{le}}")])
    panel["targets"][0]["format"] = "heatmap"
    return panel


def _panel(
    kind: str,
    title: str,
    description: str,
    defaults: dict[str, Any],
    options: dict[str, Any],
    queries: Any,
) -> Panel:
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": ref, "datasource": DATASOURCE, "expr": query, "legendFormat": name}
            for ref, (query, name) in zip("ABCD", queries, strict=False)
        ],
    }


CURVES = [
    curves(
        "Speed-up estimate against plain",
        SPEED_UP,
        (ratio("plain_seconds", "compared_seconds", "instance"), "{{instance}}"),
    ),
    curves(
        "Tokens a request and step",
        "1 is plain decoding. SGLang's spec_accept_length.",
        (ratio("emitted_tokens", "request_steps", "instance"), "{{instance}}"),
    ),
    curves(
        "Acceptance by position",
        "Of the requests that had a draft at this position: how many had it accepted.",
        (ratio("accepted_at", "proposed_at", "position"), "{{position}}"),
        unit="percentunit",
    ),
    curves(
        "Acceptance by drafter",
        "Of the drafts of each drafter: how many were accepted.",
        (ratio("accepted_draft_tokens", "draft_tokens", "drafter"), "{{drafter}}"),
        unit="percentunit",
    ),
    heatmap(
        "Drafts a request and step (K)",
        "How many requests of all steps had how many drafts.",
        "request_drafts",
    ),
    curves(
        "Drafter mix",
        "Who drafted for the requests of all steps; none is plain decoding.",
        (per_second("request_steps", "drafter"), "{{drafter}}"),
        stack="percent",
    ),
    curves(
        "Where the time goes",
        "A step's time by part, as the host's clock saw it. On a GPU a part is charged for what it "
        "waits for.",
        (
            f"{per_second('step_seconds', 'part')} / on() group_left() "
            + per_second("verify_steps"),
            "{{part}}",
        ),
        unit="s",
        stack="normal",
    ),
    curves(
        "Requests and rows a step",
        "Rows are last tokens and drafts: what the target's pass is over.",
        (ratio("request_steps", "verify_steps"), "requests"),
        (ratio("verify_rows", "verify_steps"), "rows"),
    ),
    curves(
        "Fallbacks by reason",
        "Requests a second that a step served without drafts because something failed.",
        (per_second("fallbacks", "reason"), "{{reason}}"),
        unit="reqps",
        stack="normal",
    ),
    curves(
        "Tokens and steps a second",
        "Of all servers that were chosen. Trees: steps in which drafts branched. Device: steps "
        "whose drafts the device made.",
        (per_second("emitted_tokens"), "tokens"),
        (per_second("verify_steps"), "steps"),
        (per_second("tree_steps"), "trees"),
        (per_second("device_steps"), "device"),
        unit="ops",
    ),
    curves(
        "Draft server",
        "Requests of steps that asked a draft server: did it have drafts, or why not.",
        (per_second("foreseen", "found"), "{{found}}"),
        unit="reqps",
        stack="normal",
    ),
]


def placed() -> Iterator[Panel]:
    """All panels in their places: numbers in one row, curves two in a row."""
    ids = count(1)
    for x, numbers in enumerate(STATS):
        yield {"id": next(ids), **stat(*numbers), "gridPos": {"h": 4, "w": 6, "x": 6 * x, "y": 0}}
    for n, panel in enumerate(CURVES):
        place = {"h": 8, "w": 12, "x": 12 * (n % 2), "y": 4 + 8 * (n // 2)}
        yield {"id": next(ids), **panel, "gridPos": place}


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A choice among the values of a label."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    steps = "verify_steps_total"
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource"}
    return {
        "uid": "outrider",
        "title": "Outrider: speculative decoding in SGLang",
        "tags": ["outrider", "sglang"],
        "schemaVersion": 39,
        "editable": True,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [
                {**source, "query": "prometheus", "current": {}},
                variable("model_name", "model", f"label_values({chosen(steps)}, model_name)"),
                variable("instance", "server", f"label_values({chosen(steps, MODEL)}, instance)"),
            ]
        },
        "panels": list(placed()),
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=2) + "\n"


def expressions(**variables: str) -> list[tuple[str, str]]:
    """The queries of the dashboard as it lies there: each panel's title, and what it asks.

    variables: what stands for them; those not named match all, and are of the last minute
    """
    values = {"model_name": ".*", "instance": ".*", "__rate_interval": "1m", "__range": "1m"}
    values |= variables
    found = []
    for panel in json.loads(FILE.read_text())["panels"]:
        for target in panel["targets"]:
            asked = re.sub(r"\$(\w+)", lambda name: values[name[1]], target["expr"])
            found.append((panel["title"], asked))
    return found


if __name__ == "__main__":
    FILE.write_text(text())
