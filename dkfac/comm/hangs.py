"""Say which ranks have not arrived, and where each is, before the process group's own time-out.

Input: where this rank is, as (step, stage). Output: an error on each rank that waits, which names ranks and stages.
Owns: two daemon threads and a connection of their own to torch.distributed's store, so that nothing in training waits
for them. A single rank has none.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dkfac.comm import collectives, groups, ranks_at
from dkfac.comm.groups import Groups
from dkfac.comm.ranks_at import Sighting
from dkfac.comm.store_line import StoreLine, own_connection

SHARE = 0.8
"""Default patience, as a share of the process group's time-out."""
TICKS = 20
"""Looks of the thread within the patience, at least; a rank is silent if it did not look in the last quarter of it."""
SLOWEST = 1.0
"""Seconds between looks, at most; more than 128 ranks look more rarely, because they share one store."""
POLL = datetime.timedelta(seconds=0.5)
_NUMBERS: Counter[tuple[int, ...]] = Counter()
"""Attachments so far, by the ranks of their group."""
_WATCHES: list[RankWatch] = []


def start(groups_: Groups, patience: float | None, where: Callable[[], tuple[int, str]]) -> RankWatch | None:
    """Return a watch over the ranks, or None if there is nothing to watch with: one rank, or no TCP store. ``where``,
    a method whose object is not kept alive, returns the step and the stage ("": outside of K-FAC)."""
    ranks = tuple(groups_.global_rank(rank) for rank in range(groups_.world_size))
    connection = own_connection() if ranks[1:] else None
    if connection is None:
        return None
    limit = groups.patience(groups_.parent)
    seconds = patience or SHARE * (limit or datetime.timedelta(minutes=30)).total_seconds()
    number = _NUMBERS[ranks] = _NUMBERS[ranks] + 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a store may outlive the ranks that wrote to it
    prefix = f"dkfac/watch/{restart}/{ranks[0]}-{len(ranks)}/{number}"
    return RankWatch(StoreLine(connection, prefix), groups_.rank, groups_.world_size, seconds, where)


class RankWatch:
    """Publishes where this rank is, and raises if ranks do not arrive."""

    def __init__(
        self, line: StoreLine, rank: int, world_size: int, patience: float, where: Callable[[], tuple[int, str]]
    ) -> None:
        self.line, self._rank, self._world_size, self._patience = line, rank, world_size, patience
        self._where = weakref.WeakMethod(where)
        self._tick = min(patience / TICKS, SLOWEST * max(1.0, world_size / 128))
        self._limit = max(4, round(patience / self._tick))
        self._main = threading.get_ident()
        self._waits, self.is_waiting = 0, False
        self._stuck, self._beat = 0, 0
        self._last: tuple[int, str, object] | None = None
        self._earlier: dict[int, Sighting] = {}
        self._first: Sighting | None = None
        self.verdict: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dkfac-watch", daemon=True)
        _WATCHES.append(self)
        collectives.guard = _wait
        self._thread.start()

    # --- the thread that trains -------------------------------------------------------------------------------------

    def begin_wait(self) -> None:
        self._waits += 1
        self.is_waiting = True

    def raise_verdict(self) -> None:
        if self.verdict is not None:
            raise RuntimeError(self.verdict)

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        if self in _WATCHES:
            _WATCHES.remove(self)
        if not _WATCHES:
            collectives.guard = collectives.plain_wait
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    # --- the thread that watches ------------------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(Exception):
            self.line.start()
            while not self._closed.wait(self._tick):
                where = self._where()
                if where is None:  # K-FAC was dropped without close()
                    break
                self._look(*where())
                del where
        self.line.close()
        self._closed.set()

    def _look(self, step: int, stage: str) -> None:
        """Publish where this rank is; read what another rank found; judge, if this one has not moved for long."""
        at, moves = self._line_of_code()
        token = (step, stage, self._waits if self.is_waiting else moves)
        self._stuck = self._stuck + 1 if token == self._last else 0
        self._last, self._beat = token, self._beat + 1
        mine = Sighting(self._beat, step, ranks_at.position(stage, self.is_waiting), at, self.is_waiting)
        try:
            found = self.line.publish(self._rank, mine, self._tick)
            if found is None and self._stuck >= self._limit - max(1, self._limit // 4) and not self._earlier:
                self._earlier = self.line.read_all(self._world_size, 4 * self._tick)
            if found is None and self._stuck >= self._limit:
                found = self._judge()
            self._first = self.line.first or self._first
        except (RuntimeError, TimeoutError, OSError):  # the store is gone, or whoever holds it is stopped
            held_by_rank_0 = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and dist.get_rank() != 0
            found = None
            if self._stuck >= self._limit:
                found = ranks_at.without_store(self._patience, self._rank, mine, self._first, held_by_rank_0)
        if self._stuck == 0:
            self._earlier = {}
        if found is not None:
            self._conclude(found)

    def _judge(self) -> str | None:
        """Return what all ranks are to be told; None if nobody waits in vain."""
        now = self.line.read_all(self._world_size, 4 * self._tick)
        silent = {rank for rank, seen in now.items() if rank in self._earlier and seen.beat == self._earlier[rank].beat}
        silent |= {rank for rank in range(self._world_size) if rank not in now}
        if not self.is_waiting and not silent:
            return None
        return self.line.agree(ranks_at.message(self._patience, now, silent, self._world_size), self._tick)

    def _conclude(self, text: str) -> None:
        """Make the thread that trains raise; end the process if it is inside a transfer of somebody else's."""
        self._closed.wait(2.5 * self._tick)  # the others read it first: the store may end with this process
        sys.stderr.write(f"dkfac: rank {self._rank}: {text}\n")
        sys.stderr.flush()
        self.verdict = text
        last = self._line_of_code()[1]
        if self._stuck < self._limit // 2 or self.is_waiting:
            self._closed.wait()
            return
        time.sleep(max(1.0, self._tick))
        if not self._closed.is_set() and not self.is_waiting and self._line_of_code()[1] == last:
            sys.stderr.write(f"dkfac: rank {self._rank} waits in a transfer that is not K-FAC's; it is ended\n")
            sys.stderr.flush()
            os._exit(1)

    def _line_of_code(self) -> tuple[str, object]:
        """Return the training script's line, and something that changes whenever the training thread moves on."""
        frame: Any = sys._current_frames().get(self._main)
        token = None if frame is None else (id(frame), frame.f_lasti)
        while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
            frame = frame.f_back
        return ("" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"), token


_LIBRARIES = tuple(str(Path(path).parent) for path in (torch.__file__, str(Path(__file__).parent)))


def _wait(work: Any, on_host: bool) -> None:
    """Wait for a transfer; on the host in short turns, between which a verdict is raised."""
    if not on_host:
        work.wait()
        return
    watches = list(_WATCHES)
    for watch in watches:
        watch.begin_wait()
    try:
        while True:
            try:
                work.wait(POLL)
                return
            except RuntimeError:
                if work.is_completed():  # it failed, or was completed just now
                    work.wait()
                    return
            for watch in watches:
                watch.raise_verdict()
    finally:
        for watch in watches:
            watch.is_waiting = False


@atexit.register
def _end() -> None:
    for watch in list(_WATCHES):
        watch.close()
        if watch.verdict is not None and watch.line.is_busy:  # a thread inside the store's C++ would abort the process
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
