"""A connection to torch.distributed's store in a thread of its own: a store that does not answer blocks nobody else.

Input: what a rank publishes. Output: what the others published. Owns: the connection and the thread.
"""

from __future__ import annotations

import datetime
import json
import queue
import threading
from collections.abc import Callable
from dataclasses import astuple
from typing import Any, TypeVar

import torch.distributed as dist

from dkfac.comm import groups
from dkfac.comm.ranks_at import Sighting

Answer = TypeVar("Answer")


def own_connection() -> Any:
    """Return a connection of our own to the default group's store; None if it is no TCP store."""
    store = groups.store()
    held = store
    while hasattr(held, "underlying_store"):
        held = held.underlying_store
    if not isinstance(held, dist.TCPStore):  # type: ignore[attr-defined]
        return None
    if hasattr(store, "clone"):
        return store.clone()
    return dist.TCPStore(held.host, held.port, None, False, datetime.timedelta(seconds=60))  # type: ignore[attr-defined]


class StoreLine:
    """The keys of one attachment."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.is_busy = False
        self.first: Sighting | None = None
        """Where rank 0 was last seen."""

    def start(self) -> None:
        threading.Thread(target=self._serve, name="dkfac-store", daemon=True).start()

    def close(self) -> None:
        self._calls.put(None)

    def publish(self, rank: int, seen: Sighting, seconds: float) -> str | None:
        """Publish where a rank is; return what all are to be told, if a rank has found it."""

        def call() -> str | None:
            self._store.set(f"{self._prefix}/{rank}", json.dumps(astuple(seen)))
            if rank and self._store.check([f"{self._prefix}/0"]):
                self.first = _seen(self._store.get(f"{self._prefix}/0"))
            key = f"{self._prefix}/verdict"
            return self._store.get(key).decode() if self._store.check([key]) else None

        return self._ask(call, seconds)

    def read_all(self, world_size: int, seconds: float) -> dict[int, Sighting]:
        """Return where the ranks are that have published it."""

        def call() -> dict[int, Sighting]:
            keys = {rank: f"{self._prefix}/{rank}" for rank in range(world_size)}
            if not self._store.check(list(keys.values())):
                keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
            return dict(zip(keys, map(_seen, self._store.multi_get(list(keys.values()))), strict=True))

        return self._ask(call, seconds)

    def agree(self, text: str, seconds: float) -> str:
        """Return what all ranks are told: what the first of them found."""
        return str(self._ask(lambda: self._store.compare_set(f"{self._prefix}/verdict", "", text).decode(), seconds))

    def _ask(self, call: Callable[[], Answer], seconds: float) -> Answer:
        if self.is_busy:
            raise TimeoutError("the store has not answered yet")
        found, done = list[Any](), threading.Event()

        def serve() -> None:
            try:
                found.append((call(), None))
            except Exception as error:
                found.append((None, error))
            self.is_busy = False
            done.set()

        self.is_busy = True
        self._calls.put(serve)
        if not done.wait(max(1.0, seconds)):
            raise TimeoutError("the store does not answer")
        answer, error = found[0]
        if error is not None:
            raise RuntimeError(str(error))
        return answer  # type: ignore[no-any-return]

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


def _seen(text: bytes) -> Sighting:
    return Sighting(*json.loads(text))
