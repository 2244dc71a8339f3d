"""Servers forked from a process that has imported SGLang: imports are most of a server's start.

    tests -> fork server -> server -> its scheduler, its detokenizer

SGLang is not changed, and its start method stays `spawn`. A forked server first forks seeds, which
have done nothing but import. What SGLang spawns then runs in one of them, with the environment, the
files and the pickled arguments that a new interpreter would have got.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import re
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

SEEDS = 3
"""How many processes a server may spawn in seeds. Each further one gets a new interpreter."""

AFTER_IMPORTS = re.compile(
    r"OUTRIDER_(CONFIG|PACED|RECORD|TEST_\w+)|SGLANG_(PLUGINS|CPU_OMP_THREADS_BIND)|PYTEST_\w+"
    r"|OTEL_\w+"
)
"""Variables that are read after the imports. Where others differ there is another fork server."""

ABOVE = 200
"""Files of ours get numbers from here on, out of the way of those that SGLang passes on."""

FORK_SECONDS = 240
MESSAGE_BYTES, MESSAGE_FILES = 1 << 20, 100

# -- in the tests


class ForkServers:
    """Starts servers by fork, from one process for each environment of imports.

    All of them end with it, and with the process that it is in, however that ends.
    """

    def __init__(self, logs: Path):
        self._logs = logs
        self._running: dict[frozenset[tuple[str, str]], tuple[Any, socket.socket]] = {}

    def start(self, arguments: list[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Start `python -m sglang.launch_server`; raise OSError if it cannot be forked."""
        imports = {k: v for k, v in environment.items() if not AFTER_IMPORTS.fullmatch(k)}
        key = frozenset(imports.items())
        if key not in self._running:
            self._running[key] = self._fork_server(imports)
        order = {"arguments": arguments, "environment": environment, "directory": os.getcwd()}
        ours, theirs = socket.socketpair()
        with theirs, log.open("w") as out:
            files = [theirs.fileno(), out.fileno()]
            socket.send_fds(self._running[key][1], [json.dumps(order).encode()], files)
        return Forked(ours)

    def _fork_server(self, environment: Mapping[str, str]) -> tuple[Any, socket.socket]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, (self._logs / f"forkserver{len(self._running)}.log").open("w") as out:
            files: Any = {"stdin": theirs, "stdout": out, "stderr": out}
            process = subprocess.Popen([sys.executable, __file__], env=environment, **files)
        return process, ours

    def close(self) -> None:
        """End them all."""
        for process, orders in self._running.values():
            orders.close()
            process.wait(20)


class Forked:
    """The process of a forked server, by the names that `subprocess.Popen` has."""

    def __init__(self, answers: socket.socket):
        with answers:
            answers.settimeout(FORK_SECONDS)
            self._answers = answers.makefile("rb", buffering=0)
            if not (line := self._answers.readline()):
                raise ConnectionResetError("the fork server has ended")
        self.pid, self.returncode = int(line), None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, when there is one."""
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)  # with its parent
        return self.returncode


# -- in the fork server


def main() -> None:
    """Import what servers import, and fork one for each order, until nobody can order any more."""
    sys.path[0] = os.getcwd()  # as with `python -m`
    import_everything()
    gc.freeze()
    serve(*fork_servers())


def import_everything() -> None:
    """Import what a server's processes do, and make sure that nothing else has happened."""
    from sglang.srt.entrypoints import http_server  # noqa: F401
    from sglang.srt.models import registry  # noqa: F401
    from sglang.srt.utils.hf_transformers import tokenizer

    from outrider.engines.sglang import plugin  # noqa: F401
    from outrider.engines.sglang.drafts import (
        draft_model,  # noqa: F401
        heads,  # noqa: F401
    )
    from outrider.engines.sglang.workers import base  # noqa: F401

    # SGLang reads tokenizers of this class three times in each process, in search of another class
    tokenizer._TOKENIZERS_BACKEND = "no such class"
    # it has to be imported after a server has said where its processes put their counters
    assert "prometheus_client" not in sys.modules
    # a lock that another thread holds is never released in a forked process
    assert len(os.listdir("/proc/self/task")) == 1


def fork_servers() -> tuple[dict[str, Any], int]:
    """Fork and reap servers, and return in each of them alone, with its order and its log."""
    orders, servers, watched = socket.socket(fileno=0), {}, select.poll()
    watched.register(orders, select.POLLIN)
    while True:
        for file, _ in watched.poll():
            if file in servers:
                watched.unregister(file)
                os.close(file)
                pid, answers = servers.pop(file)
                with answers:
                    answer(answers, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            message, files, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, 2)
            if not message:
                os._exit(0)
            answers, log = socket.socket(fileno=files[0]), files[1]
            if (pid := os.fork()) == 0:
                for file, (_, others) in servers.items():
                    os.close(file)
                    others.close()
                answers.close()
                orders.detach()
                return json.loads(message), log
            os.close(log)
            answer(answers, pid)
            file = os.pidfd_open(pid)
            servers[file] = pid, answers
            watched.register(file, select.POLLIN)


def answer(answers: socket.socket, number: int) -> None:
    """Tell the tests; they may not listen any more."""
    with suppress(BrokenPipeError):
        answers.sendall(f"{number}\n".encode())


# -- in a forked server


def serve(order: dict[str, Any], log: int) -> None:
    """Be `python -m sglang.launch_server`."""
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for file, number in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(file, number)
    os.close(nothing)
    os.close(log)
    os.chdir(order["directory"])
    sys.path[0] = order["directory"]
    sys.argv[1:] = order["arguments"]
    set_environment(order["environment"])
    spawn_in_seeds()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def spawn_in_seeds() -> None:
    """Let `multiprocessing` spawn in processes that are forked now, while there are any."""
    seeds: list[tuple[int, socket.socket]] = []
    for _ in range(SEEDS):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if (pid := os.fork()) == 0:
            for other in (ours, *(other for _, other in seeds)):
                other.close()
            sys.exit(grow(theirs))
        theirs.close()
        seeds.append((pid, ours))
    new_interpreter = util.spawnv_passfds

    def spawnv_passfds(path, args, files):
        if args[-1] != "--multiprocessing-fork" or not seeds:
            return new_interpreter(path, args, files)
        files = sorted(map(int, files))
        order = {"program": args[-2], "files": files, "environment": dict(os.environ)}
        pid, orders = seeds.pop(0)
        with orders:
            socket.send_fds(orders, [json.dumps(order).encode()], files)
        return pid

    util.spawnv_passfds = spawnv_passfds


def grow(orders: socket.socket) -> None:
    """Run what `python -c` would have been told to, with these files; end if nothing comes."""
    with socket.socket(fileno=moved(orders.detach())) as orders:
        message, files, _, _ = socket.recv_fds(orders, MESSAGE_BYTES, MESSAGE_FILES)
    if not message:
        os._exit(0)
    order = json.loads(message)
    for file, number in zip([moved(file) for file in files], order["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    set_environment(order["environment"])
    if "--dp-size" in sys.argv:  # its controller spawns schedulers
        spawn_in_seeds()
    sys.argv[1:] = ["--multiprocessing-fork"]
    exec(order["program"], {"__name__": "__main__"})


def moved(file: int) -> int:
    """Return the number that a file has from now on, out of the way of others."""
    number = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, ABOVE)
    os.close(file)
    return number


def set_environment(environment: dict[str, str]) -> None:
    """Put this environment in place of ours."""
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    main()
