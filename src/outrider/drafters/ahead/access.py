"""Who may use a draft socket: its user and root, and nobody else.

Prompts cross the socket, so both sides ask the kernel who is at the other end. A path does not say
who listens there: in a directory that others may write to, another user can be there first.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.drafters.ahead.connection import Closed
from outrider.errors import UsageError

ROOT_USER = 0
ELSEWHERE = "name a path in a directory of your own, or none for the default"


def default_path() -> Path:
    """Return where draft servers and hosts of this user meet if no path is named."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime) and os.path.isdir(runtime):
        return Path(runtime) / "outrider" / "draft.sock"
    try:
        return Path.home() / ".cache" / "outrider" / "run" / "draft.sock"
    except RuntimeError as error:
        raise UsageError("no home directory for a socket", fix="name a path") from error


def user_at(sock: socket.socket) -> int:
    """Return the user id of the process at the other end. Raises Closed if nobody knows.

    Of a listener it is that of the process that called `listen`.
    """
    if sys.platform != "linux":
        raise Closed("this system does not say who is at the other end of a socket")
    try:
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    except OSError as error:
        raise Closed(error.strerror or str(error)) from error
    _, user, _ = struct.unpack("iII", found)
    return int(user)


def check_user(sock: socket.socket) -> None:
    """Raise Closed unless the process at the other end is of our own user, or root's."""
    if (user := user_at(sock)) not in (os.geteuid(), ROOT_USER):
        raise Closed(f"it is a process of user {user}, not of user {os.geteuid()} or root")


def listen(path: Path | None) -> tuple[socket.socket, Path]:
    """Return a socket that only this user can open, and where it is. Raises UsageError.

    path: None makes a directory of our own for it
    """
    if sys.platform != "linux":
        raise UsageError("a draft server here: only Linux says who connects", fix="use Linux")
    folder = (path or default_path()).parent
    with _refusing(f"no directory {folder}"):
        if path is None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_directory(folder)
    path = path or default_path()
    with _refusing(f"no socket at {path}"):
        _remove_stale(path)
        return _bind(path), path


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"{what} ({why})", fix=ELSEWHERE) from error


def _check_directory(folder: Path) -> None:
    """Refuse a directory in which another user could put a socket in the place of ours."""
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), ROOT_USER):
        raise UsageError(f"{folder} belongs to user {found.st_uid}", fix=ELSEWHERE)
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise UsageError(f"others may write to {folder}", fix=f"chmod go-w it, or {ELSEWHERE}")


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that is gone. Refuse whatever else is there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise UsageError(f"{path} is there and no socket", fix="choose another path")
    if found.st_uid != os.geteuid():
        raise UsageError(f"{path} belongs to user {found.st_uid}", fix=ELSEWHERE)
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise UsageError(
                f"a draft server listens at {path}", fix="stop it, or choose another path"
            )
    path.unlink()


def _bind(path: Path) -> socket.socket:
    listener, before = socket.socket(socket.AF_UNIX), os.umask(0o177)
    try:
        listener.bind(str(path))
        listener.listen()
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.setblocking(False)
    return listener
