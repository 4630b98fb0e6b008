"""Messages between the first gradient worker and the helpers' child processes, over sockets instead of collectives.

Input: messages to helpers. Output: their answers. Owns: the connections and the threads that serve them.

The first gradient worker is the hub. It posts messages and polls for answers; dedicated threads send and receive, so
the death of a helper cannot block it. A worker that exits, for whatever reason, is seen as a closed connection.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import secrets
import socket
import threading
import time
from collections import defaultdict
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

KEY_BYTES = 16
HUB_SECONDS = 600.0
"""Seconds after which a worker that does not answer is considered lost."""


class Hub:
    """Connections to the helpers by role, and their answers."""

    def __init__(self, wanted: dict[str, int], host: str) -> None:
        self.wanted = wanted
        self.key = secrets.token_bytes(KEY_BYTES)
        self._listener = Listener((host, 0), backlog=64)
        self._closed = False
        self._outboxes: dict[tuple[str, int], queue.Queue[Any]] = {}
        self._answers: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
        self._changed = threading.Condition(threading.RLock())
        self.lost: dict[tuple[str, int], str] = {}
        """Workers whose connection was closed, and why."""
        threading.Thread(target=self._accept, name="dkfac-hub", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.address
        return str(host), int(port)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except Exception:  # from a peer that is not a worker, or from closing the listener
                time.sleep(0.01)
                continue
            threading.Thread(target=self._greet, args=(connection,), name="dkfac-hub", daemon=True).start()

    def _greet(self, connection: Connection) -> None:
        with contextlib.suppress(Exception):
            deliver_challenge(connection, self.key)  # in this thread, so that a silent peer blocks nobody else
            answer_challenge(connection, self.key)
            role, number = receive(connection)
            box: queue.Queue[Any] = queue.Queue()
            with self._changed:
                self._outboxes[role, number] = box
                self._changed.notify_all()
            threading.Thread(
                target=self._send, args=((role, number), connection, box), name="dkfac-hub", daemon=True
            ).start()
            self._receive((role, number), connection)

    def _send(self, who: tuple[str, int], connection: Connection, box: queue.Queue[Any]) -> None:
        try:
            while (message := box.get()) is not None:
                send(connection, message)
        except Exception as error:
            self._lose(who, f"nothing can be sent to it: {error}")
        finally:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
                same.shutdown(socket.SHUT_RDWR)  # close() alone would wait for the reading thread

    def _receive(self, who: tuple[str, int], connection: Connection) -> None:
        why = "its connection was closed"
        try:
            while True:
                kind, label, content = receive(connection)
                if kind == "error":
                    why = str(content)
                    break
                with self._changed:
                    self._answers[who][label] = content
                    self._changed.notify_all()
        except (OSError, EOFError):
            pass
        except Exception as error:
            why = f"what it sent cannot be read: {error}"
        self._lose(who, why)
        connection.close()

    def _lose(self, who: tuple[str, int], why: str) -> None:
        with self._changed:
            self.lost.setdefault(who, why)
            self._changed.notify_all()

    def all_of(self, role: str) -> list[tuple[str, int]]:
        """Return the workers of a role that are not lost."""
        with self._changed:
            every = [(role, i) for i in range(self.wanted[role])]
            return [who for who in every if who not in self.lost]

    def wait_for_all(self, seconds: float) -> None:
        """Wait until every worker has connected or is lost; after ``seconds``, those missing are lost."""
        every = {(role, i) for role, number in self.wanted.items() for i in range(number)}
        with self._changed:
            self._changed.wait_for(lambda: every <= {*self._outboxes, *self.lost}, seconds)
            for who in every - {*self._outboxes, *self.lost}:
                self.lost[who] = f"it did not come within {seconds:.0f} s"

    def post(self, who: tuple[str, int], message: Any) -> None:
        with self._changed:
            box = self._outboxes.get(who)
        if box is not None:
            box.put(message)

    def are_there(self, role: str, label: int) -> bool:
        """Whether all workers of a role that are not lost have answered the message with this label."""
        with self._changed:
            every = [(role, i) for i in range(self.wanted[role])]
            return all(label in self._answers[who] or who in self.lost for who in every)

    def answers(self, role: str, label: int) -> list[Any]:
        """Wait for the answers of a role's workers and return those that arrived, including answers of workers lost
        since."""
        with self._changed:
            self._changed.wait_for(lambda: self.are_there(role, label), HUB_SECONDS)
            every = [(role, i) for i in range(self.wanted[role])]
            for who in every:
                if label not in self._answers[who]:
                    self._lose(who, f"it did not answer within {HUB_SECONDS:.0f} s")
            return [self._answers[who].pop(label) for who in every if label in self._answers[who]]

    def close(self) -> None:
        self._closed = True
        for box in self._outboxes.values():
            box.put(None)
        self._listener.close()


def send(connection: Connection, message: Any) -> None:
    """Send a message by value: multiprocessing would send tensors as shared memory of the sender's host."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def connect_to_hub(address: tuple[str, int], key: bytes, role: str, number: int) -> Connection:
    """Return a worker's connection to the hub."""
    connection = Client(address, authkey=key)
    send(connection, (role, number))
    return connection
