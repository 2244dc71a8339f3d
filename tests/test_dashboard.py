"""The dashboard and the alerts ask for what is exported, and Prometheus can read them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from outrider.serving.metrics import COUNTERS, HISTOGRAM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import make_dashboard  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
LABELS = {f"{name}_total": set(own) for name, (_, *own) in COUNTERS.items()}
LABELS |= {f"{HISTOGRAM}_bucket": {"le"}}
NAMED = re.compile(r'{__name__=~"outrider\[:_\](\w+)"([^}]*)}(\[\w+\])?')
TOKEN = re.compile(r'\s*(?:[\w:.]+|"[^"]*"|=~|!=|[{}()\[\],/<>=-])')


def alerts():
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return [(rule["alert"], rule["expr"].strip()) for rule in group["rules"]]


def documented():
    """Return the queries of docs/metrics.md, asking for both names as the dashboard does."""
    (block,) = re.findall(r"```promql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = re.findall(r"^# (.*)\n(.*)$", block, re.MULTILINE)
    both = re.compile(r"outrider:(\w+)(?:{([^}]*)})?")

    def chosen(name):
        return make_dashboard.chosen(name[1], *([name[2]] if name[2] else []))

    return [(title, both.sub(chosen, query)) for title, query in found]


def queries():
    return make_dashboard.expressions() + alerts() + documented()


def faults(query):
    """Say what is wrong with a query, as far as that can be seen without Prometheus."""
    found, open_brackets, at = [], [], 0
    while at < len(query):
        token = TOKEN.match(query, at)
        if not token:
            return [f"cannot be read from {query[at:]!r}"]
        at, mark = token.end(), token[0].strip()
        if mark in "({[":
            open_brackets.append(mark)
        elif mark in ")}]" and (not open_brackets or open_brackets.pop() + mark not in "(){}[]"):
            found.append(f"bracket at {at}")
    found += ["open bracket"] * bool(open_brackets)
    for name, labels, span in NAMED.findall(query):
        if name not in LABELS:
            found.append(f"{name} is not exported")
            continue
        # a counter by itself says how old the server is
        found += [f"{name} without a range"] * (not span)
        grouped = re.search(rf"by \(([^)]*)\) \(\w+\(.{{12}}outrider\[:_\]{name}", query)
        asked = set(re.findall(r"(\w+)=", labels)) | set(re.findall(r"\w+", (grouped or "  ")[1]))
        unknown = asked - LABELS[name] - {"instance", "model_name"}
        found += [f"{name} has no label {label}" for label in sorted(unknown)]
    if not NAMED.search(query):
        found.append("asks for nothing")
    return found


def test_the_dashboard_is_what_the_script_writes():
    assert make_dashboard.FILE.read_text() == make_dashboard.text()


@pytest.mark.parametrize(("title", "query"), queries())
def test_a_query_asks_for_what_is_exported(title, query):
    assert faults(query) == []


@pytest.mark.parametrize(
    "query",
    [
        'sum(rate({__name__=~"outrider[:_]verify_steps_total"}[1m])',
        'sum(rate({__name__=~"outrider[:_]no_such_total"}[1m]))',
        'sum({__name__=~"outrider[:_]verify_steps_total"})',
        'sum by (drafter) (rate({__name__=~"outrider[:_]accepted_at_total"}[1m]))',
        'rate({__name__=~"outrider[:_]verify_steps_total", part="draft"}[1m])',
        'rate({__name__=~"outrider[:_]verify_steps_total", model_name="$model}[1m])',
        "sum(rate(outrider:verify_steps_total[1m]))",  # empty where the colon became an underscore
    ],
)
def test_twin_a_wrong_query_is_seen(query):
    assert faults(query)


def test_all_that_was_promised_is_shown():
    titles = " ".join(title for title, _ in make_dashboard.expressions())
    for shown in ("Acceptance by position", "Tokens a request and step", "Speed-up", "Fallbacks"):
        assert shown in titles
    for shown in ("Drafts a request and step (K)", "Drafter mix", "Where the time goes"):
        assert shown in titles
    asked = " ".join(query for _, query in make_dashboard.expressions())
    assert {name for name, *_ in NAMED.findall(asked)} == set(LABELS)


def test_panels_stand_side_by_side():
    taken = set()
    for panel in make_dashboard.dashboard()["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken
                taken.add((x, y))


def test_prometheus_reads_the_queries(tmp_path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here")
    rules = [{"record": f"test:{i}", "expr": query} for i, (_, query) in enumerate(queries())]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    config = str(ROOT / "deploy" / "prometheus" / "prometheus.yml")
    for command in (["check", "rules", str(file)], ["check", "config", config]):
        done = subprocess.run([promtool, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_docs_name_every_metric():
    page = PAGE.read_text()
    for name, labels in LABELS.items():
        own = f"{{{next(iter(labels))}}}" if labels and not name.endswith("_bucket") else ""
        shown = "outrider:" + name.removesuffix("_bucket") + own
        assert f"`{shown}`" in page, shown
    for name, _ in alerts():
        assert f"`{name}`" in page, name
