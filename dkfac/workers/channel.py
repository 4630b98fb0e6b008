"""A connection whose two ends know the same secret, and every message of which is authenticated.

Input: a connected socket and the secret. Output: messages. Owns: the socket.

Both ends prove that they know the secret without sending it (HMAC-SHA256 of two fresh random numbers), before a byte is
interpreted. A message carries the HMAC of its number and its content under a key of this connection and direction, so
that messages can be neither forged, changed, repeated nor reordered. Contents are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import torch

from dkfac.comm.messages import decode, encode

GREETING_SECONDS = 10.0
"""Seconds within which a new connection has to prove that it knows the secret."""
STALLED_SECONDS = 600.0
"""Seconds after which a message that was begun and does not go on is given up."""
ROLES = ("statistics", "inverse")
_MAGIC = b"dkfac-roles-1\0\0\0"
_NONCE = _MAC = 32
_WHO = struct.Struct("!BI")
_HEAD = struct.Struct("!Q32s")
_CHUNK = 1 << 20
POLL_SECONDS = 1.0


class AuthenticationError(ConnectionError):
    """The other end does not know the secret, or a message is not what it sent."""


class Channel:
    """Sends and receives messages. One thread may send while another receives."""

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        self._socket, self._keys = connection, (sending, receiving)
        self._sent = self._received = 0

    def send(self, message: Any) -> None:
        buffers = encode(message)
        code = _begin(self._keys[0], self._sent)
        for buffer in buffers:
            code.update(buffer)
        self._sent += 1
        deadline = time.monotonic() + STALLED_SECONDS
        for buffer in (_HEAD.pack(sum(map(len, buffers)), code.digest()), *buffers):
            _write(self._socket, buffer, deadline)

    def receive(self, most: Callable[[], int]) -> Any:
        """Wait for a message and return it. ``most``: returns the largest number of bytes that it may have.

        Raises EOFError if the connection was closed, AuthenticationError if the message is not authentic."""
        first = _read(self._socket, 1, None)
        deadline = time.monotonic() + STALLED_SECONDS
        size, code = _HEAD.unpack(first + _read(self._socket, _HEAD.size - 1, deadline))
        if size > most():
            raise AuthenticationError(f"a message of {size} bytes was announced, at most {most()} are possible")
        data = _read(self._socket, size, deadline)
        expected = _begin(self._keys[1], self._received)
        expected.update(data)
        if not hmac.compare_digest(code, expected.digest()):
            raise AuthenticationError("a message is not authentic")
        self._received += 1
        return decode(torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))

    def close(self) -> None:
        close(self._socket)


def _begin(key: bytes, number: int) -> hmac.HMAC:
    return hmac.new(key, struct.pack("!Q", number), hashlib.sha256)


def _code(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, _MAGIC + b"".join(parts), "sha256")


def greet_worker(connection: socket.socket, secret: bytes) -> tuple[Channel, tuple[str, int]]:
    """The hub's side of a new connection: return the channel, and the role and number of the worker."""
    _prepare(connection)
    deadline = time.monotonic() + GREETING_SECONDS
    mine = secrets.token_bytes(_NONCE)
    _write(connection, _MAGIC + mine, deadline)
    answer = bytes(_read(connection, len(_MAGIC) + _WHO.size + _NONCE + _MAC, deadline))
    who, theirs, code = answer[len(_MAGIC) : -_NONCE - _MAC], answer[-_NONCE - _MAC : -_MAC], answer[-_MAC:]
    if not hmac.compare_digest(code, _code(secret, b"worker", mine, theirs, who)):
        raise AuthenticationError("the other end does not know the secret")
    role, number = _WHO.unpack(who)
    if role >= len(ROLES):
        raise AuthenticationError(f"there is no role {role}")
    _write(connection, _code(secret, b"hub", mine, theirs, who), deadline)
    down, up = _code(secret, b"down", mine, theirs, who), _code(secret, b"up", mine, theirs, who)
    return Channel(connection, down, up), (ROLES[role], number)


def greet_hub(connection: socket.socket, secret: bytes, role: str, number: int) -> Channel:
    """The worker's side of a new connection."""
    _prepare(connection)
    deadline = time.monotonic() + GREETING_SECONDS
    theirs = bytes(_read(connection, len(_MAGIC) + _NONCE, deadline))
    if not theirs.startswith(_MAGIC):
        raise AuthenticationError("the other end is not a hub of this version of dkfac")
    theirs, mine, who = theirs[len(_MAGIC) :], secrets.token_bytes(_NONCE), _WHO.pack(ROLES.index(role), number)
    _write(connection, _MAGIC + who + mine + _code(secret, b"worker", theirs, mine, who), deadline)
    if not hmac.compare_digest(bytes(_read(connection, _MAC, deadline)), _code(secret, b"hub", theirs, mine, who)):
        raise AuthenticationError("the hub does not know the secret")
    down, up = _code(secret, b"down", theirs, mine, who), _code(secret, b"up", theirs, mine, who)
    return Channel(connection, up, down)


def close(connection: socket.socket) -> None:
    """Close a socket, also for a thread that is reading from it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(POLL_SECONDS)  # of a single call; how long to wait in all is a matter of deadlines
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanishes is noticed
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    """Return ``size`` bytes. Raises EOFError at the end of the connection, TimeoutError after the deadline."""
    data = bytearray(size)
    view, position = memoryview(data), 0
    while position < size:
        _check(deadline)
        try:
            count = connection.recv_into(view[position : position + _CHUNK])
        except TimeoutError:
            continue
        if count == 0:
            raise EOFError("the connection was closed")
        position += count
    return data


def _write(connection: socket.socket, data: bytes | bytearray, deadline: float) -> None:
    view, position = memoryview(data), 0
    while position < len(view):
        _check(deadline)
        try:
            position += connection.send(view[position : position + _CHUNK])
        except TimeoutError:
            continue


def _check(deadline: float | None) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise TimeoutError("the other end went silent")
