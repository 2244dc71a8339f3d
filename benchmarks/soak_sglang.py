"""Mixed traffic amid faults on a real SGLang server: is an answer wrong or lost, does it leak?

    python benchmarks/soak_sglang.py --state soak.json [--requests 100000] [--seed 0] [--minutes M]
    python benchmarks/soak_sglang.py --state soak.json --requests 0 --also soak1.json

Run it in the environment of scripts/setup-sglang-cpu. About 2,000 distinct requests of every kind
and form are answered once without drafts (`max_drafts: 0`). Then requests are drawn from them, each
with a drafter, up to 256 at once, and each complete answer is compared. Meanwhile clients hang up
or time out, some requests are malformed, and one trouble follows another (`soak_troubles.py`).
A third of all requests are turns of conversations: A, A + answer + more, A again, several users
with one prefix. Their texts are the target's own, so that drafts are accepted. Their answers are
compared with those of plain decoding from an empty cache, which is asked after the round.
After each round the server is left idle, and its memory, files, threads and used slots are noted.
Servers follow one another (`soak_traffic.PIECES`): with heads or with drafts on the device, half of
them in the default mode, half of them checking each KV slot that they read.

A run can be continued: `--state` has all that it found. Request N of a seed is always the same.
Runs of several seeds can go on side by side; `--also` adds their states to the result.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import sglang
from common import write
from common_sglang import Server, end_servers_at_sigterm
from rich.progress import Progress
from soak_traffic import (
    BROKEN,
    LEVELS,
    MALFORMED,
    MANNERS,
    PIECES,
    SETUPS,
    Piece,
    choices,
    difference,
    distinct_requests,
    drafter_of,
    essentials,
    num_tokens,
    with_options,
)

from outrider.report import provenance

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/engines/sglang"))
import conversations
import parity
import workload
from draft_process import TINY, DraftProcess
from server import merge_stream
from soak_troubles import TROUBLES

DISTINCT = 2000
TROUBLE_EVERY = 200
"""Requests from one trouble to the next."""

PIECE = 2_500
"""Requests that one server answers."""

TURNS = 4
"""Requests of a conversation."""

PATIENCE = 3600.0
"""Seconds after which a request is lost."""

ENOUGH = 12
"""Samples of a process that its slope of memory takes."""

FLAGS = [
    *parity.COMMON, *parity.OUTRIDER, "--attention-backend", "outrider",
    *("--speculative-draft-model-path", str(TINY / "draft"), "--speculative-num-steps", "4"),
    *("--max-total-tokens", "1600", "--max-running-requests", "96", "--enable-metrics"),
    *("--schedule-conservativeness", "0.05", "--chunked-prefill-size", "256"),
    *("--log-level-http", "warning"),
]  # fmt: skip
"""A cache that is too small for so many requests: they have fewer drafts, or are retracted."""


@dataclass
class State:
    """What a soak has found so far.

    plain: of each distinct request, what its answer has to be
    number: the next request
    counts: requests, by what became of them
    pieces_asked: the same, by the kind of server that was asked
    drafted, accepted: draft tokens, by drafter, as the server counts
    troubles: how often each has been
    fallbacks: requests of steps that went without drafts, by reason, as the server counts
    foreseen: what the draft server had, as the server counts
    samples: what the idle server used, after each round; `piece` is its process
    broken: the first answers that were wrong or lost, and troubles that failed
    """

    seed: int
    plain: list[Any] = field(default_factory=list)
    number: int = 0
    pieces: int = 0
    seconds: float = 0.0
    tokens: int = 0
    retractions: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)
    drafters: Counter[str] = field(default_factory=Counter)
    pieces_asked: Counter[str] = field(default_factory=Counter)
    drafted: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    foreseen: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    device_steps: int = 0
    samples: list[dict[str, Any]] = field(default_factory=list)
    broken: list[dict[str, Any]] = field(default_factory=list)

    @property
    def piece(self) -> Piece:
        """How the server of the next request runs."""
        return PIECES[self.number // PIECE % len(PIECES)]

    @staticmethod
    def load(file: Path, seed: int | None = None) -> State:
        """Return what a file has of this seed, or nothing yet. Without a seed: of any."""
        content = json.loads(file.read_text()) if file.exists() or seed is None else {"seed": seed}
        if seed is not None and content["seed"] != seed:
            raise SystemExit(f"{file} has seed {content['seed']}")
        state = State(**content)
        for each in dataclasses.fields(state):
            if each.type.startswith("Counter"):
                setattr(state, each.name, Counter(getattr(state, each.name)))
        return state

    def save(self, file: Path) -> None:
        """Write it in one go."""
        new = file.with_suffix(".new")
        new.write_text(json.dumps(vars(self)))
        new.replace(file)


class Refused(Exception):
    """The server did not answer with status 200."""


class Soak:
    """Asks a server, and notes in `state` what came of it."""

    def __init__(
        self, server: Server, drafts: DraftProcess, folder: Path, state: State, distinct: int
    ) -> None:
        self.server, self.drafts, self.folder, self.state = server, drafts, folder, state
        self.wishes, self._piece = distinct_requests(distinct, state.seed), state.piece
        self._texts: list[list[int]] = []
        self._turns: list[conversations.Turn] = []
        self._choices: dict[str, list[int]] = {}
        self.troubles: asyncio.Queue[str] = asyncio.Queue()
        self.session: aiohttp.ClientSession
        family = psutil.Process(server.process.pid).children(recursive=True)
        self._scheduler = max(family, key=lambda process: int(process.memory_info().rss))
        state.pieces += 1

    async def run(
        self, levels: Sequence[int], over: Callable[[], bool], tick: Callable[[], None]
    ) -> None:
        """Ask round after round until it is over. tick: called after each"""
        # a connection that is kept may be closed by the server just when it is used
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        patience = aiohttp.ClientTimeout(total=PATIENCE)
        options: Any = {"connector": connector, "timeout": patience, "read_bufsize": 1 << 22}
        async with aiohttp.ClientSession(self.server.url, **options) as self.session:
            if not self.state.plain:
                limit = asyncio.Semaphore(48)
                self.state.plain = await asyncio.gather(
                    *(self._plain(w, limit) for w in self.wishes)
                )
                await self.rest()
                tick()
            for text in conversations.TEXTS:
                prompt = {"prompt": conversations.SHARED + text, "model": "default"}
                tokens = (await self.ask("/v1/tokenize", prompt))["tokens"]
                self._texts.append([*tokens, *(await self._turn(tokens, 100, "none")).answer])
            troubling = asyncio.create_task(self._trouble())
            while not over():
                started = time.monotonic()
                await self._round(levels)
                await self.rest()
                self.state.seconds += time.monotonic() - started
                tick()
            troubling.cancel()

    async def _plain(self, wish: workload.Wish, limit: asyncio.Semaphore) -> dict[str, Any]:
        async with limit:
            answer = await self.ask(*with_options(wish, max_drafts=0))
        return essentials(answer)

    async def _round(self, levels: Sequence[int]) -> None:
        running: set[asyncio.Task[None]] = set()
        names = list(TROUBLES)
        for level in random.Random(f"{self.state.seed}/{self.state.number}").sample(
            levels, len(levels)
        ):
            for _ in range(4 * level):
                while len(running) >= level:
                    _, running = await asyncio.wait(running, return_when="FIRST_COMPLETED")
                running.add(asyncio.create_task(self._one(self.state.number)))
                self._count_up(1, names)
                if self.state.number % 8 == 0:  # as many again and a half, four at a time
                    running.add(asyncio.create_task(self._converse(self.state.number)))
                    self._count_up(TURNS, names)
        await asyncio.gather(*running)
        await self.troubles.join()
        await self._compare_turns()

    def _count_up(self, count: int, troubles: Sequence[str]) -> None:
        """Count requests, and cause a trouble now and then."""
        turn, more = divmod(self.state.number, TROUBLE_EVERY)
        self.state.number += count
        if more + count >= TROUBLE_EVERY:
            self.troubles.put_nowait(troubles[(turn + 1) % len(troubles)])

    async def _trouble(self) -> None:
        while True:
            name = await self.troubles.get()
            try:
                await TROUBLES[name](self)
                self.state.troubles[name] += 1
            except Exception as error:
                self._note("trouble failed", 0, name, repr(error))
            self.troubles.task_done()

    # -- one request

    async def _one(self, number: int) -> None:
        """Ask request `number` in its manner, and count what became of it."""
        rng = random.Random(f"{self.state.seed}/{number}")
        drafter = drafter_of(self.state.seed, number, self._piece.setup)
        if drafter not in self._choices:
            self._choices[drafter] = choices(self.wishes, drafter, self._piece)
        index = rng.choice(self._choices[drafter])
        (manner,) = rng.choices(list(MANNERS), list(MANNERS.values()))
        wish, name = self.wishes[index], f"{self.wishes[index].kind}/{self.wishes[index].form}"
        path, body = with_options(wish, drafter=drafter)
        self._asked(1)
        try:
            if manner == "malformed":
                self.state.counts[await self._malformed(rng.choice(MALFORMED))] += 1
                return
            if manner == "hang up":
                await self._hang_up(path, body, rng.randrange(6))
                self.state.counts["hung up"] += 1
                return
            seconds = rng.uniform(0.01, 0.5) if manner == "time out" else None
            answer = await asyncio.wait_for(self.ask(path, body), seconds)
        except asyncio.TimeoutError as error:
            if manner == "time out":
                self.state.counts["timed out"] += 1
            else:
                self._note("lost", number, name, drafter, repr(error))
            return
        except Exception as error:
            self._note("lost", number, name, drafter, repr(error))
            return
        self.state.counts["compared"] += 1
        self.state.drafters[drafter] += 1
        self.state.tokens += num_tokens(answer)
        differs = difference(wish, answer, self.state.plain[index], self._piece.exact)
        if differs is not None:
            self._note("wrong", number, name, drafter, differs)

    def _asked(self, count: int) -> None:
        self.state.counts["asked"] += count
        piece = self._piece
        mode = "deterministic" if piece.exact else "default"
        self.state.pieces_asked[f"{mode}{', sanitizer' if piece.sanitize else ''}"] += count

    # -- conversations

    async def _converse(self, number: int) -> None:
        """Ask A, A + answer + more, and A again."""
        rng = random.Random(f"{self.state.seed}/{number}/turns")
        drafter = drafter_of(self.state.seed, number, self._piece.setup)
        self._asked(TURNS)
        try:
            context = rng.choice(self._texts)[: rng.randrange(20, 60)]
            first = await self._turn(context, rng.randrange(4, 24), drafter)
            turns = [first]
            for _ in range(TURNS - 2):
                more = rng.sample(range(20, 256), 3)
                context = [*context, *turns[-1].answer, *more]
                turns.append(await self._turn(context, rng.randrange(4, 24), drafter))
            turns.append(await self._turn(first.context, first.most, drafter))
        except Exception as error:
            self._note("lost", number, "conversation", drafter, repr(error))
            return
        self.state.counts["turns"] += len(turns)
        self._turns += turns

    async def _turn(self, context: Sequence[int], most: int, drafter: str) -> conversations.Turn:
        body = conversations.body(context, most, {"drafter": drafter})
        answer = await self.ask("/generate", body)
        return conversations.Turn(context, most, answer["output_ids"])

    async def _compare_turns(self) -> None:
        """Compare the turns of a round with plain decoding's, from an empty cache."""
        if self._turns:
            await self.rest()
        limit = asyncio.Semaphore(16)

        async def compare(turn: conversations.Turn) -> None:
            async with limit:
                plain = await self._turn(turn.context, turn.most, "none")
            self.state.counts["compared"] += 1
            self.state.tokens += len(turn.answer)
            if list(plain.answer) != list(turn.answer):
                self._note("wrong", self.state.number, "conversation", turn.answer, plain.answer)

        await asyncio.gather(*(compare(turn) for turn in self._turns))
        self._turns = []

    async def ask(self, path: str, body: dict[str, Any]) -> Any:
        """Return the answer; a stream's is put together from its pieces."""
        async with self.session.post(path, json=body) as reply:
            if reply.status != 200:
                raise Refused(reply.status, (await reply.text())[:300])
            if not body.get("stream"):
                return await reply.json()
            lines = [line async for line in reply.content if line.startswith(b"data: {")]
        return merge_stream([json.loads(line[6:]) for line in lines])

    async def _hang_up(self, path: str, body: dict[str, Any], after: int) -> None:
        async with self.session.post(path, json={**body, "stream": True}) as reply:
            for _ in range(after):
                await reply.content.readline()

    async def _malformed(self, body: dict[str, Any] | str) -> str:
        """Ask what has to be refused. Returns what became of it."""
        data, kind = body if isinstance(body, str) else json.dumps(body), "application/json"
        async with self.session.post(
            "/generate", data=data, headers={"Content-Type": kind}
        ) as reply:
            text = await reply.text()
        if reply.status not in (400, 422):
            raise Refused(reply.status, text[:300])
        return "refused"

    def _note(self, what: str, number: int, *details: Any) -> None:
        self.state.counts[what] += 1
        if len(self.state.broken) < 40:
            self.state.broken.append({"what": what, "number": number, "details": details})

    # -- at rest

    async def rest(self) -> None:
        """Wait until the server is idle, look what it uses, and empty its prefix cache."""
        deadline = time.monotonic() + PATIENCE
        while any(used := await self._in_use()) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        assert await self.post("/flush_cache") == 200, "an idle server flushes its cache"
        process = self._scheduler
        self.state.samples.append(
            {
                "piece": self.state.pieces,
                "requests": self.state.number,
                "rss_mb": round(process.memory_info().rss / 2**20, 2),
                "files": process.num_fds(),
                "threads": process.num_threads(),
                "used_slots": used[1],
            }
        )

    async def _in_use(self) -> tuple[int, int]:
        """Return how many requests and slots are in use; slots of the prefix cache are not."""
        async with self.session.get("/get_load") as reply:
            if reply.status == 200:  # SGLang 0.5.11
                loads = await reply.json()
                return sum(x["num_reqs"] for x in loads), sum(x["num_tokens"] for x in loads)
        async with self.session.get("/v1/loads") as reply:
            loads = (await reply.json())["loads"]
        running = sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
        return running, sum(load["num_used_tokens"] for load in loads)

    async def post(self, path: str, body: dict[str, Any] | None = None) -> int:
        """Post, and return the status."""
        async with self.session.post(path, json=body) as reply:
            await reply.read()
        return reply.status

    def count(self) -> None:
        """Add up what the server counted, before it ends."""
        metrics = self.server.metrics()
        self.state.retractions += self.server.log.read_text(errors="replace").count(
            "Retract requests"
        )
        self.state.device_steps += int(metrics.get("outrider:device_steps_total", 0))
        for label, counter, name in (
            ("reason", self.state.fallbacks, "fallbacks"),
            ("found", self.state.foreseen, "foreseen"),
            ("drafter", self.state.accepted, "accepted_draft_tokens"),
            ("drafter", self.state.drafted, "draft_tokens"),
        ):
            for key, value in metrics.items():
                if key.startswith(f"outrider:{name}_total{{"):
                    counter[key.partition(f'{label}="')[2].partition('"')[0]] += int(value)


# -- a run


@contextmanager
def started(
    folder: Path, piece: Piece, start: Callable[..., Server]
) -> Iterator[tuple[Server, DraftProcess]]:
    """Start a draft server, and a server with all drafters of a piece.

    start: takes a model, flags and environment
    """
    drafts = DraftProcess(folder / "draft.sock")
    drafters = {**parity.DRAFTERS, **SETUPS[piece.setup], **{name: {} for name in BROKEN}}
    drafters["ahead"] = {"socket": str(drafts.socket), "wait": 0.02}
    drafters["adaptive"] = {"ahead": str(drafts.socket)}
    options = {"max_drafts": 4, "draft_timeout": 0.5, "sanitize": piece.sanitize}
    environment = parity.profile(folder, drafters, **options)
    mode = parity.DETERMINISTIC if piece.exact else []
    for name in ("fault", "clock"):
        (folder / name).write_text("")
        environment[f"OUTRIDER_TEST_{name.upper()}"] = str(folder / name)
    try:
        with start(TINY / "target", *FLAGS, *mode, **environment) as server:
            yield server, drafts
    finally:
        drafts.stop()


def memory_slope(samples: Sequence[dict[str, Any]]) -> float | None:
    """Return MB of the scheduler in 1,000 requests, over the later half of each process's life.

    None if no process has lived long enough to tell.
    """
    products = squares = 0.0
    for piece in {sample["piece"] for sample in samples}:
        mine = [sample for sample in samples if sample["piece"] == piece]
        if len(mine) < ENOUGH:
            continue
        later = mine[len(mine) // 2 :]
        x = np.array([sample["requests"] / 1000 for sample in later])
        y = np.array([sample["rss_mb"] for sample in later])
        products += float(((x - x.mean()) * (y - y.mean())).sum())
        squares += float(((x - x.mean()) ** 2).sum())
    return round(products / squares, 3) if squares else None


def together(states: Sequence[State]) -> State:
    """Return what the soaks of several seeds have found."""
    total = State(seed=states[0].seed)
    for state in states:
        samples = [{**each, "piece": total.pieces + each["piece"]} for each in state.samples]
        for field_ in dataclasses.fields(State):
            if field_.name not in ("seed", "samples"):
                added = getattr(total, field_.name) + getattr(state, field_.name)
                setattr(total, field_.name, added)
        total.samples += samples
    return total


def summary(states: Sequence[State]) -> dict[str, Any]:
    """Return what the soaks of several seeds have found."""
    state = together(states)
    counts = state.counts
    return {
        "seeds": [each.seed for each in states],
        "distinct": len(state.plain),
        "requests": counts["asked"],
        "compared": counts["compared"],
        "tokens": state.tokens,
        "wrong": counts["wrong"],
        "lost": counts["lost"],
        "leaked_slots": sum(sample["used_slots"] for sample in state.samples),
        "memory_slope_mb_per_1000": memory_slope(state.samples),
        "troubles_failed": counts["trouble failed"],
        "concurrencies": sorted({level for levels in LEVELS.values() for level in levels}),
        "pieces": state.pieces,
        "minutes": round(state.seconds / 60, 1),
        "retractions": state.retractions,
        "clients": {name: counts[name] for name in ("hung up", "timed out", "refused")},
        "conversation_turns": counts["turns"],
        "requests_by_server": dict(state.pieces_asked),
        "compared_by_drafter": dict(state.drafters),
        "drafts": dict(state.drafted),
        "accepted_drafts": dict(state.accepted),
        "device_steps": state.device_steps,
        "troubles": dict(state.troubles),
        "fallbacks": dict(state.fallbacks),
        "foreseen": dict(state.foreseen),
        "broken": state.broken,
        "samples": state.samples,
    }


def soak_piece(
    state: State, distinct: int, over: Callable[[], bool], tick: Callable[[], None]
) -> None:
    """Ask one server, until it is over or the server has had its share."""
    folder = Path(tempfile.mkdtemp(prefix="outrider-soak-"))
    last = (state.number // PIECE + 1) * PIECE

    def start(model: Path, *flags: str, **environment: str) -> Server:
        return Server(model, *flags, log=folder / "server.log", **environment)

    with started(folder, state.piece, start) as (server, drafts):
        soak = Soak(server, drafts, folder, state, distinct)
        try:
            levels = LEVELS[state.piece.setup]
            asyncio.run(soak.run(levels, lambda: state.number >= last or over(), tick))
        finally:
            with suppress(Exception):  # it may have crashed
                soak.count()
            tick()


def main() -> None:
    """Soak, and write benchmarks/results/soak_sglang.json, or that of SGLang 0.5.11."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--state", type=Path, required=True, help="what was found so far")
    parser.add_argument("--requests", type=int, default=100_000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="end the piece after so long")
    parser.add_argument("--distinct", type=int, default=DISTINCT)
    parser.add_argument("--out", type=Path, help="another file for the result")
    parser.add_argument(
        "--also", type=Path, nargs="*", default=[], help="states of other seeds, for the result"
    )
    args = parser.parse_args()
    end_servers_at_sigterm()
    if missing := [file for file in args.also if not file.exists()]:
        parser.error(f"--also {missing[0]}: no such file")
    also, state = [State.load(file) for file in args.also], State.load(args.state, args.seed)
    seeds = [state.seed, *(other.seed for other in also)]
    if len(set(seeds)) < len(seeds):
        parser.error(f"--also: a seed would count twice: {seeds}")
    made, ends = provenance(), time.monotonic() + 60 * args.minutes

    def over() -> bool:
        return state.number >= args.requests or time.monotonic() > ends

    with Progress() as progress:
        task = progress.add_task("requests", total=args.requests, completed=state.number)

        def tick() -> None:
            progress.update(task, completed=state.number)
            state.save(args.state)

        while not over():
            soak_piece(state, args.distinct, over, tick)
    found = summary([state, *also])
    print(json.dumps({k: v for k, v in found.items() if k != "samples"}, indent=2))
    topic = "soak_sglang_0_5_11" if sglang.__version__ == "0.5.11" else "soak_sglang"
    write(topic, {"provenance": made, "sglang": sglang.__version__, **found}, args.out)
    if found["wrong"] or found["lost"] or found["leaked_slots"] or found["troubles_failed"]:
        sys.exit("wrong, lost or leaked")


if __name__ == "__main__":
    main()
