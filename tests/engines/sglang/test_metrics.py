"""What the server tells of itself: counters for Prometheus, spans for OpenTelemetry."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import REGISTRY
from server import accepted, proposed

from outrider.control.cost import StepCost
from outrider.control.decision import CpuDrafts, DeviceDrafts, Plain
from outrider.core import (
    Draft,
    Outcome,
    Outcomes,
    PointMass,
    Proposal,
    SamplingParams,
    chain,
)
from outrider.engines.sglang.arguments import settings
from outrider.serving.clock import StepClock
from outrider.serving.metrics import MIN_PLAIN_STEPS, Metrics
from outrider.serving.tracing import Tracer
from outrider.serving.values import Columns, Launched, Members, ServedRequest, Settled

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import make_dashboard  # noqa: E402

TINY = ROOT / "src" / "outrider" / "assets" / "tiny"
FLAGS = [
    *("--dtype", "float32", "--mem-fraction-static", "0.1", "--attention-backend", "outrider"),
    *("--max-total-tokens", "2048", "--max-running-requests", "8", "--enable-metrics"),
    *("--speculative-algorithm", "OUTRIDER", "--speculative-num-steps", "4"),
    *("--speculative-draft-model-path", str(TINY / "draft")),
]
TEXT = "On a misty morning, an outrider rode out of Harrow."


# -- the counters by themselves


@pytest.fixture
def make():
    """Return a function that makes the counters, and leave the registry as it was."""
    before = set(REGISTRY._collector_to_names)
    yield lambda control=None: Metrics({"model_name": "m", "dp_rank": "0"}, control)
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def value(name, **labels):
    labels = {"model_name": "m", "dp_rank": "0", **labels}
    return REGISTRY.get_sample_value(f"outrider:{name}", labels)


def step(*kept, drafts=None, names=None, parts=None, on_device=""):
    """Return a step that is over.

    kept: how many drafts of each request
    names: who drafted for each
    parts: seconds
    on_device: what drafted on the device
    """
    drafts = drafts or [chain([1, 2, 3])] * len(kept)
    names = names or ["model"] * len(kept)
    requests = [ServedRequest(r, (1, 2), SamplingParams(), seed=0) for r in range(len(kept))]
    outcomes = [
        Outcome(request, (0,) * (k + 1), tuple(range(k + 1)), len(draft.tokens), k, None)
        for request, k, draft in zip(requests, kept, drafts, strict=True)
    ]
    proposal, clock = Proposal.of(drafts), StepClock(None)
    clock.parts.update(parts or {})
    decision = CpuDrafts(proposal, names) if len(proposal.parents) else Plain()
    if on_device:
        decision = DeviceDrafts(on_device, proposal.num_drafts, width=4)
    members = Members.whole(requests, np.ones(len(kept), np.int64), Columns.of(requests))
    launched = Launched(members, decision, early=False, ticket=None, clock=clock)
    return Settled(launched, np.arange(len(kept)), proposal, Outcomes.of(outcomes))


def test_a_step_is_counted(make):
    drafts, names = [chain([1, 2, 3]), chain([1, 2]), chain([])], ["model", "ngram", "ngram"]
    make().record(step(3, 1, 0, drafts=drafts, names=names))
    assert value("verify_steps_total") == 1
    assert value("verify_rows_total") == 8
    assert value("emitted_tokens_total") == 7
    steps = {name: value("request_steps_total", drafter=name) for name in ("model", "ngram")}
    assert (steps, value("request_steps_total", drafter="none")) == ({"model": 1, "ngram": 1}, 1)
    assert [value("proposed_at_total", position=str(p)) for p in (1, 2, 3, 4)] == [2, 2, 1, None]
    assert [value("accepted_at_total", position=str(p)) for p in (1, 2, 3, 4)] == [2, 1, 1, None]
    buckets = [value("request_drafts_bucket", le=f"{k}.0") for k in (0, 1, 2, 3, 4)]
    assert buckets == [1, 1, 2, 3, 3]
    assert value("fallbacks_total", reason="error") == 0
    assert value("device_steps_total") == 0


def test_a_step_with_drafts_of_the_device_is_counted(make):
    make().record(step(3, 0, drafts=[chain([1, 2, 3]), chain([])], on_device="eagle3"))
    assert value("device_steps_total") == 1
    assert value("accepted_draft_tokens_total", drafter="eagle3") == 3
    assert value("request_steps_total", drafter="none") == 1


def test_totals_are_counted_once(make):
    metrics = make()
    for total in (3, 3, 5):
        metrics.totals("fallbacks", {"error": total})
    assert value("fallbacks_total", reason="error") == 5


def test_acceptance_by_position_counts_a_tree_once(make):
    """Of three drafts at one position, one can be accepted: then the position is at 100 %."""
    tree = Draft((1, 2, 3, 4), (-1, -1, -1, 1), PointMass())
    make().record(step(2, drafts=[tree], names=["suffix"]))
    for position in ("1", "2"):
        assert value("proposed_at_total", position=position) == 1
        assert value("accepted_at_total", position=position) == 1
    assert value("tree_steps_total") == 1
    assert value("draft_tokens_total", drafter="suffix") == 4


def test_a_position_never_accepted_is_shown_as_0(make):
    make().record(step(0))
    assert value("accepted_at_total", position="3") == 0


def test_speed_up_is_against_plain_steps_that_were_measured(make):
    metrics = make()
    parts = {"draft": 1.0, "forward": 3.0, "scheduler": 1.0}
    drafted = step(2, 2, parts=parts)
    plain = step(0, 0, drafts=[chain([])] * 2, parts={"draft": 0.5, "forward": 2.0})
    for _ in range(MIN_PLAIN_STEPS - 1):
        metrics.record(plain)
        metrics.record(drafted)
    assert (value("compared_seconds_total"), value("plain_seconds_total")) == (0, 0)
    metrics.record(plain)  # 2 s without the drafter, which had none
    assert (value("compared_seconds_total"), value("plain_seconds_total")) == (2.5, 2)
    metrics.record(drafted)  # 3 tokens each in 5 s; plain: 3 steps of 2 s
    assert (value("compared_seconds_total"), value("plain_seconds_total")) == (7.5, 8)
    metrics.record(step(2, parts=parts))  # of one request nothing is known
    assert value("compared_seconds_total") == 7.5


def test_before_that_speed_up_is_against_what_control_knows(make):
    control = StepCost()
    metrics = make(control)
    drafted = step(1, parts={"forward": 3.0, "scheduler": 1.0})
    metrics.record(drafted)
    assert value("compared_seconds_total") == 0
    for _ in range(400):
        control.observe(1, 3, 2.0)
    metrics.record(drafted)
    assert value("compared_seconds_total") == 4
    assert value("plain_seconds_total") == pytest.approx(2 * (2 + 1), rel=0.02)


# -- a real server, scraped and traced


class Collector(ThreadingHTTPServer):
    """Receives spans by OTLP over HTTP. answer: the status that it gives; None: it hangs"""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Receive)
        self.answer: int | None = 200
        self.spans, self.resources, self.calls = [], [], 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def steps(self):
        """Return the spans of steps, and for each its children in their order."""
        inside = defaultdict(list)
        for span in sorted(self.spans, key=lambda span: span.start_time_unix_nano):
            inside[span.parent_span_id].append(span)
        return [(span, inside[span.span_id]) for span in inside[b""]]


class _Receive(BaseHTTPRequestHandler):
    def do_POST(self):
        self.server.calls += 1
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.answer is None:
            time.sleep(20)
            return
        if self.server.answer == 200:
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.server.resources.append(group.resource)
                self.server.spans += [span for scope in group.scope_spans for span in scope.spans]
        self.send_response(self.server.answer)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def collector():
    with Collector() as found:
        yield found
        found.shutdown()


@pytest.fixture(scope="module")
def server(launch, collector, tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "profile.yaml"
    path.write_text("drafter: model\ntracing: true\ndrafters: {raising: {}, suffix: {}}\n")
    environment = {
        "OUTRIDER_CONFIG": str(path),
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_SERVICE_NAME": "sglang-test",
    }
    return launch("metrics", TINY / "target", *FLAGS, **environment).wait()


def wish(tokens=24, **options):
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    params["custom_params"] = {"outrider": options}
    return "/generate", {"text": TEXT, "sampling_params": params}


def wait_for(happened, seconds=20):
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_spans_say_what_the_answer_says(server, collector):
    collector.spans.clear()
    meta = server.ask(*wish(24))["meta_info"]
    wait_for(lambda: len(collector.steps()) >= meta["spec_verify_ct"])
    steps = [
        ({a.key: a.value for a in span.attributes}, span, inside)
        for span, inside in collector.steps()
    ]
    assert len(steps) == meta["spec_verify_ct"]
    total = {
        key: sum(facts[f"outrider.{key}"].int_value for facts, *_ in steps)
        for key in ("requests", "rows", "drafts", "accepted", "emitted")
    }
    assert total["requests"] == meta["spec_verify_ct"]
    assert total["emitted"] == meta["completion_tokens"] - 1
    assert total["drafts"] == proposed(meta) > 0
    assert total["accepted"] == accepted(meta) > 0
    assert total["rows"] == total["drafts"] + total["requests"]
    for facts, span, inside in steps:
        names = [v.string_value for v in facts["outrider.drafters"].array_value.values]
        assert names == (["model"] if facts["outrider.drafts"].int_value else [])
        assert facts["outrider.tree"].bool_value is False
        assert span.name == "outrider.step"
        parts = [child.name.removeprefix("outrider.") for child in inside]
        # the scheduler works while the step is in flight
        assert parts == ["host", "draft", "host", "scheduler", "forward", "verify", "host"]
        # one after the other, and together the step
        ends = [child.end_time_unix_nano for child in inside]
        starts = [child.start_time_unix_nano for child in inside]
        assert [span.start_time_unix_nano, *ends] == [*starts, span.end_time_unix_nano]
    named = {a.key: a.value.string_value for a in collector.resources[0].attributes}
    assert named["service.name"] == "sglang-test"
    assert named["outrider.model_name"] == str(TINY / "target")


@pytest.mark.parametrize("answer", [503, 400, None])
def test_a_failing_collector_costs_no_request(answer, server, collector):
    """It is out of order, refuses, or hangs: answers come as before, and spans come again."""
    before = server.ask(*wish(24))["output_ids"]
    collector.answer, calls = answer, collector.calls
    answers = server.ask_all([wish(24)] * 8, 4)
    wait_for(lambda: collector.calls > calls)
    answers.append(server.ask(*wish(24)))
    assert [found["output_ids"] for found in answers] == [before] * 9
    collector.answer = 200
    collector.spans.clear()
    wait_for(lambda: server.ask(*wish(24)) and collector.spans, seconds=60)


def test_the_counters_agree(server):
    """Drafts, none, and a drafter that fails: sums over labels are the same sums."""
    plain = server.ask_all([wish(24, max_drafts=0)] * 6, 1)
    for drafter in ("model", "suffix", "raising"):
        server.ask_all([wish(24, drafter=drafter)] * 4, 2)
    found = {k.removeprefix("outrider:"): v for k, v in server.metrics().items()}
    steps = found["request_steps_total"]
    assert found["request_drafts_count"] == steps
    assert found["request_drafts_sum"] == found["draft_tokens_total"]
    assert found["accepted_at_total"] == found["accepted_draft_tokens_total"]
    assert found["verify_rows_total"] == steps + found["draft_tokens_total"]
    assert found["emitted_tokens_total"] == steps + found["accepted_draft_tokens_total"]
    for position in range(1, 5):
        kept, proposed = (
            _at(found, f"{name}_at_total", position) for name in ("accepted", "proposed")
        )
        assert 0 <= kept <= proposed
        assert proposed > 0
    assert 0 < found["compared_seconds_total"] <= found["step_seconds_total"]
    assert found["plain_seconds_total"] > 0
    assert found["fallbacks_total"] > 0
    assert len({tuple(answer["output_ids"]) for answer in plain}) == 1


def _at(found, name, position):
    return sum(v for k, v in found.items() if k.startswith(name) and f'position="{position}"' in k)


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text;version=1.0.0"])
def test_the_server_exports_what_the_dashboard_asks_for(accept, server):
    """In the text format, and in the one that Prometheus asks for."""
    server.ask(*wish(24))
    reply = requests.get(server.url + "/metrics", headers={"Accept": accept}, timeout=30)
    assert reply.headers["Content-Type"].startswith(accept.partition(";")[0])
    exported = set(re.findall(r"^(\w[\w:]+)\{", reply.text, re.MULTILINE))
    queries = " ".join(query for _, query in make_dashboard.expressions())
    queries += (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    asked = set(re.findall(r'__name__=~"([^"]+)"', queries))
    assert len(asked) > 10
    for name in asked:
        assert len([found for found in exported if re.fullmatch(name, found)]) == 1, name


# -- tracing by itself


def test_tracing_without_opentelemetry_stops_the_server(monkeypatch, profile):
    from test_plugin import arguments

    from outrider.core import Unsupported

    for name, content in profile(tracing=True).items():
        monkeypatch.setenv(name, content)
    settings.apply(arguments())
    for missing in ("opentelemetry.sdk.trace.export", "opentelemetry.exporter.otlp.proto.http"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, missing, None)
            for name in [n for n in sys.modules if n.startswith(f"{missing}.")]:
                without.delitem(sys.modules, name)
            with pytest.raises(Unsupported, match=r"pip install 'outrider\[otel\]'"):
                settings.apply(arguments())


def test_a_fault_in_tracing_ends_the_tracing_only(monkeypatch, caplog):
    tracer = Tracer({"model_name": "m"})
    fine, broken = step(1), step(1, names=["model", "one too many"])
    for settled in (fine, broken):
        settled.launched.clock.lap("forward")
    tracer.step(fine)
    assert "tracing ends" not in caplog.text
    tracer.step(broken)
    assert "tracing ends" in caplog.text
    monkeypatch.setattr(tracer, "_spans", None)  # not called any more
    tracer.step(fine)
