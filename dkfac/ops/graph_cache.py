"""Cache of CUDA graphs for functions that run repeatedly on the same memory.

Input: functions that launch work. Output: their results, by replay from the second call on. Owns: graphs, memory pools
and capture streams.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
"""Capture stream per device, for graphs that run one after the other: cuBLAS keeps a workspace per stream, and graphs
captured on the same stream share it."""


def own_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream other than the one where graphs are captured: torch has a few, and hands them out in turn."""
    common, stream = _common_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    while stream == common:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _common_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _STREAMS[device]


class Pieces:
    """CUDA graphs, and what is launched between them at each replay."""

    def __init__(self, pool: Any, device: torch.device) -> None:
        self._pool, self._device, self._work = pool, device, list[Callable[[], Any]]()

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        self._work.append(self._graph.replay)
        self._graph.capture_end()

    def cut(self, work: Callable[[], Any]) -> None:
        self.end()
        self._work.append(work)
        self.begin()
        torch.zeros(1, device=self._device)  # torch warns of an empty graph

    def replay(self) -> None:
        for work in self._work:
            work()


_CAPTURING = threading.local()


def runs_between_graphs(work: Callable[[], Any]) -> bool:
    """If a graph is being captured in this thread, end it, begin another, and have ``work`` run between the two at each
    replay; else return False. The memory that the work uses must be kept alive by the work."""
    pieces: Pieces | None = getattr(_CAPTURING, "pieces", None)
    if pieces is not None:
        pieces.cut(work)
    return pieces is not None


def capture(
    function: Callable[[], Any], pool: Any, device: torch.device, stream: torch.cuda.Stream | None = None
) -> tuple[Pieces, Any]:
    """Return CUDA graphs of what a function launches on a device, and what it returned. Nothing is executed.

    Unlike ``torch.cuda.graph`` it does not empty the cache of the allocator, which the next step needs again.
    """
    pieces = Pieces(pool, device)
    stream = _common_stream(device) if stream is None else stream
    stream.wait_stream(torch.cuda.current_stream(device))
    collects = gc.isenabled()
    gc.disable()  # collecting another graph would free its memory, which invalidates the capture
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            pieces.begin()
            _CAPTURING.pieces = pieces
            try:
                found = function()
            finally:
                _CAPTURING.pieces = None
                pieces.end()
    finally:
        if collects:
            gc.enable()
    torch.cuda.current_stream(device).wait_stream(stream)
    return pieces, found


class GraphPool:
    """Memory pool of graphs that run one after the other and whose results are consumed immediately.

    ``own_stream``: they may run concurrently with other graphs, and so must not share a cuBLAS workspace with them.
    """

    def __init__(self, *, own_stream: bool = False) -> None:
        self._own_stream = own_stream
        self._places: dict[torch.device, tuple[Any, torch.cuda.Stream | None, Pieces]] = {}

    def capture(self, function: Callable[[], Any], device: torch.device) -> tuple[Pieces, Any]:
        """Return a graph in this pool. A first one is kept, so that the pool survives when all others are freed."""
        if device not in self._places:
            stream = own_stream(device) if self._own_stream else None
            handle = torch.cuda.graph_pool_handle()
            first, _ = capture(lambda: torch.zeros(1, device=device), handle, device, stream)
            self._places[device] = handle, stream, first
        handle, stream, _ = self._places[device]
        return capture(function, handle, device, stream)


class GraphedFunction:
    """A function of tensors with fixed addresses, captured when it is called for the second time."""

    def __init__(self, pool: GraphPool | None = None) -> None:
        self._key: list[Any] | None = None
        self._graph: Pieces | None = None
        self._found: Any = None
        self._pool, self._is_refused = GraphPool() if pool is None else pool, False

    def run(self, key: list[Any], function: Callable[[], Any], device: torch.device) -> Any:
        """Return the function's result; ``key``: the objects it uses. The first call is eager: it compiles kernels."""
        if self._key is None or len(key) != len(self._key) or not all(map(_same, key, self._key)):
            self._key, self._graph, self._found = key, None, None
            return function()
        if self._graph is None and not self._is_refused:
            try:
                self._graph, self._found = self._pool.capture(function, device)
            except Exception as error:  # out of memory, or an operation that cannot be captured
                self._is_refused = True
                warnings.warn(
                    f"cuda_graph: not captured, steps go on without: {type(error).__name__}: {error}", stacklevel=2
                )
        if self._graph is None:
            return function()
        self._graph.replay()
        return self._found


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, (tuple, float)) and one == other)
