"""A connection is bounded both ways, and never waited for."""

from __future__ import annotations

import socket

import pytest

from outrider.drafters.ahead.connection import (
    MAX_LINES,
    MAX_MESSAGE,
    Closed,
    Connection,
    Gone,
    TooLong,
)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.setblocking(False)
    yield Connection(ours, longest=1000, at_once=4000), theirs
    ours.close(), theirs.close()


def test_one_look_takes_a_part_and_the_next_ones_the_rest(ends):
    connection, theirs = ends
    theirs.sendall(b'{"n": 1}\n' * 2000)
    found = []
    for _ in range(20):
        some = list(connection.receive())
        assert len(some) <= MAX_LINES
        assert len(connection._in) <= 4000
        found += some
    assert found == [{"n": 1}] * 2000
    assert not connection.has_line


def test_a_message_may_come_in_pieces(ends):
    connection, theirs = ends
    for piece in (b'{"n"', b": 1", b'}\n{"m": 2}\n{'):
        assert not connection.has_line
        theirs.sendall(piece)
        found = list(connection.receive())
    assert found == [{"n": 1}, {"m": 2}]


@pytest.mark.parametrize("said", [b" " * 1001, b" " * 1001 + b"\n", b'{"n": 1}\n' + b"a" * 1001])
def test_a_long_message_ends_the_connection(ends, said):
    connection, theirs = ends
    theirs.sendall(said)
    with pytest.raises(Closed, match="more than 1000 bytes"):
        list(connection.receive())


@pytest.mark.parametrize(
    "said",
    [b"\xff\xfe\n", b"[1]\n", b"7\n", b"\n", b"[" * 900 + b"\n", b"1" * 999 + b"\n", b'{"a":}\n'],
)
def test_what_is_no_message_ends_the_connection(ends, said):
    connection, theirs = ends
    theirs.sendall(said)
    with pytest.raises(Closed, match="not"):
        list(connection.receive())


@pytest.mark.parametrize("unread", [b"", b"what it never read"])
def test_what_was_said_before_it_hung_up_is_read(ends, unread):
    """A refusal says why, even to one who is still talking."""
    connection, theirs = ends
    connection._socket.sendall(unread)
    theirs.sendall(b'{"refused": "full"}\n')
    theirs.close()
    messages = connection.receive()
    assert next(messages) == {"refused": "full"}
    with pytest.raises(Gone, match="hung up"):
        next(messages)


def test_a_message_that_would_not_be_taken_is_not_sent(ends):
    connection, theirs = ends
    with pytest.raises(TooLong):
        connection.send({"text": "x" * MAX_MESSAGE})
    with pytest.raises(TooLong):
        connection.send({"text": "x" * 100}, longest=100)
    with pytest.raises(BlockingIOError):
        theirs.recv(1)
    connection.send({"n": 1})
    assert theirs.recv(100) == b'{"n":1}\n'
