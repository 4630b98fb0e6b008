"""Messages between the first gradient worker and the helpers' child processes, over sockets instead of collectives.

Input: messages to helpers. Output: their answers. Owns: the connections and the threads that serve them.

The first gradient worker is the hub. It posts messages and polls for answers; dedicated threads send and receive, so
the death of a helper cannot block it. A worker that exits, for whatever reason, is seen as a closed connection. Who
does not prove within seconds that it knows the secret is turned away (``workers/channel.py``).
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import defaultdict
from typing import Any

from dkfac.workers import channel as channels
from dkfac.workers.channel import AuthenticationError, Channel

HUB_SECONDS = 600.0
"""Seconds after which a worker that does not answer is considered lost."""
START_BYTES = 64 << 20
"""Largest message before the sizes of the model are known."""
STRANGERS = 64
"""Connections that have not proved yet that they know the secret; one more ends the oldest of them."""


class Hub:
    """Connections to the helpers by role, and their answers."""

    def __init__(self, wanted: dict[str, int], host: str, secret: bytes) -> None:
        """``host``: the address to listen at, which no more than the helpers need to reach."""
        self.wanted = wanted
        self._secret = secret
        self._largest = START_BYTES
        self._listener = socket.create_server((host, 0), backlog=64)
        self._closed = False
        self.strangers: list[socket.socket] = []
        self.num_refused = 0
        self.outboxes: dict[tuple[str, int], queue.Queue[Any]] = {}
        self._answers: dict[tuple[str, int], dict[int, Any]] = defaultdict(dict)
        self._changed = threading.Condition(threading.RLock())
        self.lost: dict[tuple[str, int], str] = {}
        """Workers whose connection was closed, and why."""
        threading.Thread(target=self._accept, name="dkfac-hub", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def expect(self, largest: int) -> None:
        """Refuse messages of more than ``largest`` bytes from now on."""
        self._largest = largest

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # from a peer that has gone, or from closing the listener
                time.sleep(0.01)
                continue
            with self._changed:
                self.strangers.append(connection)
                if len(self.strangers) > STRANGERS:
                    channels.close(self.strangers.pop(0))
            threading.Thread(target=self._greet, args=(connection,), name="dkfac-hub", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        """Serve a connection, in a thread of its own, so that a silent peer blocks nobody else."""
        try:
            channel, who = channels.greet_worker(connection, self._secret)
            box = self._admit(who)
        except (OSError, EOFError) as error:
            with self._changed:
                self.num_refused += isinstance(error, AuthenticationError)
            channels.close(connection)
            return
        finally:
            with self._changed, contextlib.suppress(ValueError):
                self.strangers.remove(connection)
        threading.Thread(target=self._send, args=(who, channel, box), name="dkfac-hub", daemon=True).start()
        self._receive(who, channel)

    def _admit(self, who: tuple[str, int]) -> queue.Queue[Any]:
        with self._changed:
            if who in self.outboxes or not 0 <= who[1] < self.wanted.get(who[0], 0):
                raise AuthenticationError(f"{who[0]} worker {who[1]} is connected already, or not wanted")
            box = self.outboxes[who] = queue.Queue()
            self._changed.notify_all()
        return box

    def _send(self, who: tuple[str, int], channel: Channel, box: queue.Queue[Any]) -> None:
        try:
            while (message := box.get()) is not None:
                channel.send(message)
        except Exception as error:
            self._lose(who, f"nothing can be sent to it: {error}")
        finally:
            channel.close()

    def _receive(self, who: tuple[str, int], channel: Channel) -> None:
        why = "its connection was closed"
        try:
            while True:
                kind, label, content = channel.receive(lambda: self._largest)
                if kind == "error":
                    why = str(content)
                    break
                with self._changed:
                    self._answers[who][label] = content
                    self._changed.notify_all()
        except AuthenticationError as error:
            why = str(error)
        except (OSError, EOFError):
            pass
        except Exception as error:
            why = f"what it sent cannot be read: {error}"
        self._lose(who, why)
        channel.close()

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
            self._changed.wait_for(lambda: every <= {*self.outboxes, *self.lost}, seconds)
            refused = f"; {self.num_refused} connections did not know the secret" if self.num_refused else ""
            for who in every - {*self.outboxes, *self.lost}:
                self.lost[who] = f"it did not come within {seconds:.0f} s{refused}"

    def post(self, who: tuple[str, int], message: Any) -> None:
        with self._changed:
            box = self.outboxes.get(who)
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
        channels.close(self._listener)
        with self._changed:
            for box in self.outboxes.values():
                box.put(None)
            for connection in self.strangers:
                channels.close(connection)


def connect_to_hub(address: tuple[str, int], secret: bytes, role: str, number: int, attempts: int = 5) -> Channel:
    """Return a worker's connection to the hub. A hub that many strangers talk to may need several attempts."""
    for attempt in range(attempts):
        connection = socket.create_connection(address, timeout=channels.GREETING_SECONDS)
        try:
            return channels.greet_hub(connection, secret, role, number)
        except (OSError, EOFError) as error:
            channels.close(connection)
            if isinstance(error, AuthenticationError) or attempt == attempts - 1:
                raise AuthenticationError(
                    f"the hub at {address[0]}:{address[1]} and the {role} worker {number} did not agree ({error}): do "
                    f"all ranks have the same secret?"
                ) from error
        time.sleep(0.1 * 2**attempt)
    raise AssertionError(attempts)
