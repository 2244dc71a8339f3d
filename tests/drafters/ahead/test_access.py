"""A draft socket is its user's and root's: who listens, who asks, and where it is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from talk import HELLO, Clock, Host, line, open_text, small_server

from outrider.control import adaptive_control
from outrider.core import Request, SamplingParams
from outrider.drafters import AheadDrafter
from outrider.drafters.ahead import access
from outrider.drafters.ahead.connection import Closed
from outrider.errors import UsageError

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
AS_OTHER = f"""
import os, socket, sys
os.setgroups([]); os.setgid({OTHER}); os.setuid({OTHER})
sock, path = socket.socket(socket.AF_UNIX), sys.argv[1]
sock.settimeout(20)
"""
LISTENS = """
sock.bind(path); os.chmod(path, 0o777); sock.listen()
print("ready", flush=True)
read = b""
while True:
    host = sock.accept()[0]
    while piece := host.recv(65536):
        read += piece
    print(read, flush=True)
"""
ASKS = """
sock.connect(path)
try:
    sock.sendall(sys.argv[2].encode())
    print(sock.recv(65536), flush=True)
except OSError:
    print(b"", flush=True)
"""


@pytest.fixture
def shared():
    """A directory in which everyone may make files, as /tmp."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def other_user(script, *args):
    command = [sys.executable, "-c", AS_OTHER + script, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@as_root
def test_another_user_who_listens_first_is_told_nothing(shared, caplog):
    path, clock = shared / "draft.sock", Clock()
    squatter = other_user(LISTENS, path)
    try:
        assert squatter.stdout.readline() == "ready\n"
        drafter, request = AheadDrafter(path, clock=clock), Request(1, (5, 6), SamplingParams(), 0)
        for _ in range(300):
            drafter.start([request])
            clock.now += 1.0
        drafter.close()
        assert squatter.stdout.readline() == "b''\n"
    finally:
        squatter.kill()
        squatter.wait()
        squatter.stdout.close()
    (said,) = caplog.messages
    assert f"user {OTHER}, not of user 0 or root" in said
    assert drafter._faults < 12  # it looks there less and less often


@as_root
def test_another_user_who_asks_is_not_heard(shared, caplog):
    """Even if the socket's mode lets them connect."""
    path = shared / "draft.sock"
    server = small_server(path)
    path.chmod(0o777)
    said = (line(HELLO) + line(open_text(3))).decode()
    stranger = other_user(ASKS, path, said)
    try:
        while stranger.poll() is None:
            server.turn(0.05)
        assert stranger.stdout.read() == "b''\n"
    finally:
        stranger.kill()
        stranger.wait()
        stranger.stdout.close()
    assert server._growth.names == []
    assert not server._peers
    assert f"a host is not heard: it is a process of user {OTHER}" in caplog.text
    server.close()


def test_only_this_user_and_root_are_trusted(monkeypatch):
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    assert access.user_at(ours) == os.geteuid()
    for user, us in [(0, 0), (1000, 1000), (0, 1000)]:
        monkeypatch.setattr(access, "user_at", lambda sock, user=user: user)
        monkeypatch.setattr(os, "geteuid", lambda us=us: us)
        access.check_user(ours)
    for user, us in [(1000, 0), (1001, 1000), (OTHER, 1000)]:
        monkeypatch.setattr(access, "user_at", lambda sock, user=user: user)
        monkeypatch.setattr(os, "geteuid", lambda us=us: us)
        with pytest.raises(Closed, match=f"user {user}"):
            access.check_user(ours)
    ours.close(), theirs.close()


def test_a_system_that_does_not_know_is_refused(tmp_path, monkeypatch, caplog):
    small_server(tmp_path / "there.sock").close()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "draft.sock"))
        listener.listen()
        monkeypatch.setattr(sys, "platform", "plan9")
        drafter = AheadDrafter(tmp_path / "draft.sock")
        drafter.start([Request(1, (5, 6), SamplingParams(), 0)])
    assert drafter._connection is None
    assert "does not say who" in caplog.text
    with pytest.raises(UsageError, match="only Linux"):
        small_server(tmp_path / "other.sock")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o772, 0o720])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(UsageError, match=r"others may write .*; chmod go-w it, or name a path"):
        small_server(tmp_path / "draft.sock")
    tmp_path.chmod(mode & 0o755)
    small_server(tmp_path / "draft.sock").close()
    tmp_path.chmod(0o1777)  # nobody can put a socket in the place of ours
    small_server(tmp_path / "draft.sock").close()


@as_root
def test_what_belongs_to_another_user_is_refused(tmp_path):
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "stale.sock"))
    os.chown(tmp_path / "stale.sock", OTHER, OTHER)
    with pytest.raises(UsageError, match=f"stale.sock belongs to user {OTHER}"):
        small_server(tmp_path / "stale.sock")
    os.chown(tmp_path, OTHER, OTHER)
    with pytest.raises(UsageError, match=f"belongs to user {OTHER}"):
        small_server(tmp_path / "draft.sock")


def test_a_server_that_hangs_still_listens(tmp_path):
    """Its queue of connections is full: who starts another one does not wait."""
    path = tmp_path / "draft.sock"
    with socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(path))
        hung.listen(0)
        hosts = [Host(path)]
        with pytest.raises(UsageError, match="a draft server listens"):
            small_server(path)
        assert path.exists()
        hosts[0].close()
    small_server(path).close()  # over the dead one's socket


@pytest.fixture
def short_path():
    """A directory whose name leaves room: the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as found:
        yield Path(found)


def test_by_default_both_meet_in_a_private_directory(short_path, monkeypatch):
    monkeypatch.setenv("HOME", str(short_path / "home"))
    (short_path / "home").mkdir()
    places = {str(short_path): short_path / "outrider"}
    places |= dict.fromkeys(
        ["", "relative", str(short_path / "none")], short_path / "home/.cache/outrider/run"
    )
    for runtime, folder in places.items():
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        server = small_server(None)
        assert server.path == folder / "draft.sock"
        assert folder.stat().st_mode & 0o777 == 0o700
        drafter, control = AheadDrafter(), adaptive_control(ahead=True)
        for one in (drafter, control.free["ahead"]):
            one.start([Request(7, (1, 2, 3), SamplingParams(), 0)])
        for _ in range(4):
            server.turn(0.0)
        for one in (drafter, control.free["ahead"]):
            one.meanwhile()
            assert one._trees.keys() == {7}
        server.close()
        folder.chmod(0o777)
        with pytest.raises(UsageError, match="others may write"):
            small_server(None)
        folder.chmod(0o700)


def test_without_a_home_a_path_has_to_be_named(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(UsageError, match="no home directory for a socket; name a path"):
        AheadDrafter()
