"""CUDA graphs of functions that run again and again on the same memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MOST = 2
"""Graphs of one layer's sums, for as many places as its input and gradient come to lie in by turns."""


def capture(function: Callable[[], Any], pool: Any, device: torch.device) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return a graph of what a function launches on a device, and what it returned. Nothing is run.

    Unlike ``torch.cuda.graph`` it leaves the cached memory alone: tensors that lie in the same place at each step shall
    go on to do so.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    collects = gc.isenabled()
    gc.disable()  # another graph that is collected meanwhile would free its memory, which ends the capture
    try:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                found = function()
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph, found


class Pool:
    """Memory for graphs that run one after the other and whose results are used at once."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._first: torch.cuda.CUDAGraph | None = None

    def handle(self, device: torch.device) -> Any:
        """Return what ``capture`` takes. A graph that stays keeps the memory, when all others have been let go."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
            self._first, _ = capture(lambda: torch.zeros(1, device=device), self._handle, device)
        return self._handle


class Captured:
    """A function of tensors that stay where they are, captured when it is asked for a second time."""

    def __init__(self, pool: Pool | None = None) -> None:
        self._key: list[Any] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._found: dict[str, Tensor] = {}
        self._pool = Pool() if pool is None else pool

    def run(self, key: list[Any], function: Callable[[], dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
        """Return what the function does; ``key``: the objects it uses. The first time all kernels are compiled."""
        if self._key is None or len(key) != len(self._key) or not all(map(_same, key, self._key)):
            self._key, self._graph = key, None
            return function()
        if self._graph is None:
            self._graph, self._found = capture(function, self._pool.handle(device), device)
        self._graph.replay()
        return self._found


def _same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, (tuple, float)) and one == other)


class SumGraphs:
    """A layer's sums from graphs, one for each place that its input and gradient were found in twice."""

    def __init__(self) -> None:
        self._pool = Pool()
        self._graphs: dict[str, dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor]] | None]] = {}

    def run(self, name: str, tensors: list[Tensor], key: Any, function: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return what the function makes of the tensors, in memory that the next call may use again."""
        places = (key, *((t.data_ptr(), t.stride()) for t in tensors))
        graphs = self._graphs.setdefault(name, {})
        if places not in graphs:
            if len(graphs) >= MOST:
                graphs.clear()
            graphs[places] = None
            return function()
        held = graphs[places]
        if held is None:  # the results stay, so that no later graph is given their memory
            device = tensors[0].device
            held = graphs[places] = capture(function, self._pool.handle(device), device)
        held[0].replay()
        return held[1]
