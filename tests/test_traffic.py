"""The arithmetic of benchmarks/traffic.py, on runs that are made up, and its clients."""

from __future__ import annotations

import argparse
import http.server
import json
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import traffic_clients
from traffic_clients import Answer, Traffic, WrongAnswer, run_clients, sequence
from traffic_figures import FIXED, HISTORIES, TRAFFIC, VirtualTimes, run_figures, summaries
from traffic_plan import FIXED_CONTENDERS, Recording, plan

CPU = {"scheduler": 0.0, "others": 0.0, "client": 0.0}


def run(contender, round_=0, turn=None, mode=TRAFFIC, **figures):
    """A run of bare SGLang, but for some figures."""
    token_ms = {"median": 10.0, "p95": 12.0, "edit": 10.0, "chat": 10.0}
    return {
        "mode": mode, "device": "d", "kind": "mixed", "batch": 16, "round": round_,
        "contender": contender, "turn": round_ if turn is None else turn,
        "tokens_per_second": figures.get("speed", 1000.0),
        "token_ms": {**token_ms, **figures.get("token_ms", {})},
        "first_token_ms": {"median": figures.get("first", 20.0), "p95": 30.0},
        "cpu_share": {**CPU, "scheduler": figures.get("share", 0.4)},
    }  # fmt: skip


def goal(found, text):
    (one,) = [goal for goal in found["goals"] if text in goal["goal"]]
    return one["found"], one["met"]


# -- one run


def test_figures_of_a_run():
    """A window of two seconds, from 10 to 12. One request began before it, one after it."""
    answers = [
        Answer("chat", 101, sent=8.9, first=9.0, last=11.0),  # half of it in the window
        Answer("edit", 11, sent=10.0, first=10.5, last=11.0),
        Answer("chat", 11, sent=11.0, first=11.1, last=13.1),  # 0.9 of 2 seconds in it
        Answer("edit", 11, sent=12.5, first=12.6, last=13.0),
    ]
    samples = (CPU, {"scheduler": 1.0, "others": 0.5, "client": 0.1})
    found = run_figures(Traffic(answers, 10.0, 12.0, samples), VirtualTimes())
    assert found["users"] == 2
    assert found["tokens_per_second"] == pytest.approx((50 + 11 + 1 + 4.5) / 2, abs=0.06)
    assert found["token_ms"] == {"median": 125.0, "p95": 200.0, "chat": 200.0, "edit": 50.0}
    assert found["first_token_ms"] == {"median": 300.0, "p95": 500.0}
    assert found["cpu_share"] == {"scheduler": 0.5, "others": 0.25, "client": 0.05}


def test_virtual_times():
    """From 10 to 11 the CPU works for the device, half of the time."""
    times = VirtualTimes(real=[10.0, 11.0], virtual=[0.0, 0.5], excused=[0.0, 0.5])
    assert [times.at(t) for t in (9.0, 10.0, 10.5, 11.0, 13.0)] == [-1.0, 0.0, 0.25, 0.5, 2.5]
    assert [times.excused_at(t) for t in (9.0, 10.5, 13.0)] == [0.0, 0.25, 0.5]
    answers = [Answer("chat", 11, sent=10.0, first=10.0, last=12.0)]
    samples = (CPU, {**CPU, "scheduler": 1.25})
    found = run_figures(Traffic(answers, 10.0, 12.0, samples), times)
    assert found["token_ms"]["median"] == 150.0
    assert found["tokens_per_second"] == pytest.approx(11 / 1.5, abs=0.06)
    assert found["cpu_share"]["scheduler"] == 0.5
    assert (found["seconds"], found["real_seconds"]) == (1.5, 2.0)
    assert [VirtualTimes().at(3.0), VirtualTimes().excused_at(3.0)] == [3.0, 0.0]


# -- summaries


def test_ratios_are_those_of_a_turn():
    """A slow second round changes nothing: bare SGLang is as slow there."""
    runs = [
        *(run("bare", 0), run("adaptive", 0, speed=1200.0)),
        *(run("bare", 1, speed=500.0), run("adaptive", 1, speed=650.0)),
    ]
    (cell,) = summaries(runs)[TRAFFIC]
    ratio = cell["contenders"]["adaptive"]["by_bare"]["tokens_per_second"]
    assert ratio == {"median": 1.25, "min": 1.2, "max": 1.3}
    assert cell["contenders"]["bare"]["measured"]["tokens_per_second"]["median"] == 750.0


def test_an_interrupted_round_has_two_turns():
    runs = [
        *(run("bare", turn=0), run("none", turn=0, speed=990.0)),
        *(run("bare", turn=1, speed=500.0), run("adaptive", turn=1, speed=600.0)),
        run("adaptive again", turn=2, speed=600.0),  # bare SGLang's turn is missing
    ]
    (cell,) = summaries(runs)[TRAFFIC]
    speeds = {
        name: found["by_bare"]["tokens_per_second"]["median"]
        for name, found in cell["contenders"].items()
        if "by_bare" in found
    }
    assert speeds == {"none": 0.99, "adaptive": 1.2}


# -- goals


@pytest.mark.parametrize(
    ("text", "good", "bad", "found"),
    [
        ("time per token, chat", {"token_ms": {"chat": 10.2}}, {"token_ms": {"chat": 10.3}}, 1.03),
        ("95th percentile", {"token_ms": {"p95": 13.2}}, {"token_ms": {"p95": 13.5}}, 1.125),
        ("of edits", {"token_ms": {"edit": 4.0}}, {"token_ms": {"edit": 4.1}}, 0.41),
        ("first token", {"first": 21.0}, {"first": 22.0}, 1.1),
        ("16: tokens/s", {"speed": 1200.0}, {"speed": 1190.0}, 1.19),
        ("CPU share", {"share": 0.48}, {"share": 0.5}, 1.25),
    ],
)
def test_goals_of_adaptive(text, good, bad, found):
    def goals(figures):
        made = summaries([run("bare"), run("adaptive", **figures)])
        return next(one for one in made["goals"] if text in one["goal"])

    assert goals(good)["met"]
    missed = goals(bad)
    assert (missed["found"], missed["met"]) == (found, False)


def test_goals_beside_other_servers():
    runs = [
        *(run("bare"), run("adaptive", speed=1200.0), run("adaptive again", speed=1240.0)),
        *(run("none", speed=990.0), run("device 2", speed=1212.0), run("device 4", speed=1250.0)),
    ]
    found = summaries(runs)
    assert goal(found, "best of none and device") == (0.96, False)
    assert goal(found, "two starts") == (0.033, False)
    assert goal(summaries(runs[:-1]), "best of none and device") == (0.99, True)


def test_histories_must_agree():
    runs = [
        *(run("bare", mode=HISTORIES), run("fresh", mode=HISTORIES, speed=1200.0)),
        run("after chats", mode=HISTORIES, speed=1170.0),
    ]
    assert goal(summaries(runs), "histories") == (0.026, True)
    runs.append(run("after edits", mode=HISTORIES, speed=1250.0))
    assert goal(summaries(runs), "histories") == (0.068, False)


def fixed(contender, kind, batch, speed, turn=0):
    rest = "tokens_per_step rows_per_step ideal_tokens_per_second share_of_ideal idle_ms_median"
    place = {"mode": FIXED, "device": "d", "kind": kind, "batch": batch, "round": 0, "turn": turn}
    figures = dict.fromkeys([*rest.split(), "idle_ms_p99"], 1.0)
    return {**place, **figures, "contender": contender, "tokens_per_second": speed}


def test_goals_of_a_fixed_batch():
    cells = [("edit", 16, 3000.0, 995.0), ("chat", 16, 970.0, 1000.0), ("edit", 64, 2e3, 1e3)]
    runs = [
        fixed(name, kind, batch, speed)
        for kind, batch, adaptive, none in cells
        for name, speed in (("bare", 1000.0), ("adaptive", adaptive), ("none", none))
    ]
    found = summaries(runs)
    assert goal(found, "batch: adaptive, slowest of 3 cells (chat, B = 16)") == (0.97, False)
    assert goal(found, "batch: none, slowest of 3 cells (edit, B = 16)") == (0.995, True)
    assert goal(found, "batch: edit, B = 16") == (3.0, True)
    assert goal(found, "batch: edit, B = 64") == (2.0, False)


# -- the plan, and a run that was interrupted


def arguments(**changed):
    usual = {
        "devices": ["d"], "batches": [4, 16], "rounds": 2, "servers": 3, "history_batch": 16,
        "contenders": ["bare", "none", "adaptive", "device 4"], "fixed_batches": [16],
    }  # fmt: skip
    return argparse.Namespace(**{**usual, **changed})


def test_a_plan_starts_few_servers_at_once():
    parts = plan(arguments(), [TRAFFIC], [])
    assert [part.contenders for part in parts] == [
        ("bare", "none", "adaptive"),
        ("bare", "device 4"),
    ]
    assert [len(part.turns) for part in parts] == [4, 4]
    histories = plan(arguments(), [HISTORIES], [])
    assert [len(part.contenders) for part in histories] == [6, 6], "servers are new in each round"


def test_a_plan_goes_on_where_it_was():
    done = [run(name, 0) for name in ("bare", "none")]
    (part,) = plan(arguments(batches=[16], rounds=1, servers=8), [TRAFFIC], done)
    assert part.turns[0].contenders == ("bare", "adaptive", "device 4")
    done += [run(name, 0, turn=1) for name in part.contenders]
    assert plan(arguments(batches=[16], rounds=1), [TRAFFIC], done) == []


def test_a_result_file_goes_on(tmp_path):
    file, settings = tmp_path / "traffic.json", {"seconds": 20}
    first = Recording(file)
    first.begin(settings, [TRAFFIC], resumed=False)
    for contender in ("bare", "none"):
        first.add(run(contender))
    for contender in FIXED_CONTENDERS[:2]:
        first.add(fixed(contender, "edit", 16, 100.0, turn=1))
    second = Recording(file)
    second.begin(settings, [FIXED], resumed=True)
    assert [one["mode"] for one in second.runs] == [TRAFFIC, TRAFFIC], "half a turn is redone"
    assert second.turns == 1
    second.add(run("bare", 1))
    assert [one["session"] for one in second.finish()["runs"]] == [0, 0, 1]
    with pytest.raises(SystemExit, match="was measured with"):
        Recording(file).begin({"seconds": 8}, [FIXED], resumed=True)
    anew = Recording(file)
    anew.begin({"seconds": 8}, [TRAFFIC], resumed=False)
    assert anew.runs == []


def test_a_wrong_answer_stops_all(tmp_path):
    recording = Recording(tmp_path / "traffic.json")
    recording.begin({}, [TRAFFIC], resumed=False)
    recording.add(run("bare"))
    recording.stop("A wrong answer.")
    again = Recording(tmp_path / "traffic.json")
    for act in (again.finish, lambda: again.begin({}, [TRAFFIC], resumed=True)):
        with pytest.raises(SystemExit, match="A wrong answer"):
            act()
    again.begin({}, [TRAFFIC], resumed=False)
    assert again.runs == []


# -- clients


@pytest.fixture
def server():
    """A server that writes the recorded texts; its handler's `spoil` may change a chunk's ids."""
    texts, asked = {}, []
    ask = sequence("test", 3)
    for client in range(3):
        for number in range(60):
            prompt = ask(client, number).prompt
            texts[tuple(prompt.ids)] = prompt.output

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        spoil = staticmethod(lambda ids: ids)
        disable_nagle_algorithm = True

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            params = body["sampling_params"]
            output = texts[tuple(body["input_ids"])][: params["max_new_tokens"]]
            half = len(output) // 2
            try:
                for ids in (output[:half], output[half:]):
                    time.sleep(0.01)
                    event = f"data: {json.dumps({'output_ids': self.spoil(ids)})}\n\n".encode()
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            except OSError:
                pass  # the client has hung up

        def log_message(self, *args):
            pass

    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    serving.daemon_threads = True
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    serving.handler, serving.asked = Handler, asked
    yield serving
    serving.shutdown()
    serving.server_close()


def test_clients_see_the_whole_window(server):
    samples = iter(["begun", "ended"])
    found = run_clients(
        server.server_port, 3, sequence("test", 3), 0.05, 0.3, lambda: next(samples), interval=8
    )
    assert found.samples == ("begun", "ended")
    assert found.ended - found.begun > 0.2
    assert all(a.sent < a.first <= a.last for a in found.answers)
    assert max(a.last - a.first for a in found.answers) > 0.005
    # no client has more than one request without an answer, which was sent after the window
    assert len(server.asked) - len(found.answers) <= 3
    assert any(found.begun <= a.sent < found.ended for a in found.answers)
    assert {body["sampling_params"]["stream_interval"] for body in server.asked} == {8}


def test_twin_a_wrong_token_is_found(server):
    server.handler.spoil = staticmethod(lambda ids: [*ids[:-1], ids[-1] + 1])
    with pytest.raises(WrongAnswer, match="not the recorded text"):
        run_clients(server.server_port, 3, sequence("test", 3), 0.0, 0.1)


def test_twin_a_lost_token_is_found(server):
    server.handler.spoil = staticmethod(lambda ids: ids[:-1])
    with pytest.raises(WrongAnswer, match="not the recorded text"):
        run_clients(server.server_port, 3, sequence("test", 3), 0.0, 0.1)


def test_servers_get_the_same_requests_and_clients_do_not():
    one, same, other = sequence("round 0", 16), sequence("round 0", 16), sequence("round 1", 16)
    places = [(client, number) for client in range(16) for number in range(20)]
    assert all(one(*place) == same(*place) for place in places)
    assert sum(one(*place) == other(*place) for place in places) == 0
    shifts = {one(*place).prompt.ids[1] for place in places}
    assert len(shifts) == len(places), "ids of two requests are shifted alike"
    lengths = [one(*place).tokens for place in places]
    low, high = traffic_clients.TOKENS
    assert low <= min(lengths) < low + 20
    assert high - 20 < max(lengths) <= high
