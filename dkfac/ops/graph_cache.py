"""Cache of CUDA graphs for functions that run repeatedly on the same memory.

Input: functions that launch work. Output: their results, by replay from the second call on. Owns: graphs, memory pools,
capture streams and staging buffers.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dkfac.ops import many
from dkfac.ops.torch_private import foreach_copy_, foreach_mul

ALIGNMENT_BYTES = 512
"""Alignment in bytes, the same as torch's allocator's."""

MOST_GRAPHS = 256
"""Limit on graphs of functions with staged inputs; beyond it, all are captured again."""

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


class StagedFunctions:
    """Functions of tensors whose addresses change: they are copied to a staging buffer, from which graphs read them.

    All of them share one buffer and one pool, so the results of a graph are copied again before the next one runs.
    """

    def __init__(self) -> None:
        self._inputs, self._results, self.pool = StagingBuffer(), StagingBuffer(), GraphPool()
        self._graphs: dict[Any, GraphedFunction] = {}
        self._memories: tuple[Tensor | None, Tensor | None] = (None, None)
        """The memories that the graphs use."""
        self._places: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        """By key: the arguments of the function in the staging buffer, and the views that tensors are copied to."""
        self._sources: dict[Any, many.Sources | None] = {}
        """By key and layouts: how one launch copies all of them, inside the graph; None: not created yet."""

    def run(
        self, key: Any, function: Callable[..., Sequence[Tensor]], scales: Sequence[float], *groups: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return what the function returns for groups of tensors, each concatenated to one, times ``scales``.

        ``key``: everything else that it depends on, and the tensors' shapes.
        """
        self._inputs.clear()
        self._results.clear()
        inputs, results = self._memories
        is_new = inputs is not self._inputs.memory or results is not self._results.memory
        if is_new or (key not in self._graphs and len(self._graphs) >= MOST_GRAPHS):
            self._memories = self._inputs.memory, self._results.memory
            self._graphs.clear()  # they would keep the old memory alive
            self._places.clear()
            self._sources.clear()
        copies, parts = self._places.get(key) or self._inputs.place(*groups)
        if self._inputs.has_room:
            self._places[key] = copies, parts
        tensors = [tensor for group in groups for tensor in group]
        sources, name = self._launched(key, tensors, parts)
        if sources is not None:
            sources.give(tensors)
        else:
            foreach_copy_(parts, tensors)

        def work() -> list[Tensor]:
            if sources is not None:
                sources.gather()
            return self._results.keep(*([t] for t in function(*copies)))

        graph = self._graphs.setdefault(name, GraphedFunction(self.pool))
        found = graph.run([copies, self._results.memory, sources], work, copies[0].device)
        return list(foreach_mul(found, list(scales)))

    def _launched(self, key: Any, tensors: list[Tensor], parts: list[Tensor]) -> tuple[many.Sources | None, Any]:
        """Return what copies tensors of these layouts inside the graph, from their second call on, or None if that is
        not possible, and the key of the graph."""
        if not self._inputs.has_room:
            return None, key
        name = key, *[(t.shape, t.stride(), t.dtype) for t in tensors]
        if name not in self._sources:
            if len(self._sources) >= MOST_GRAPHS:
                self._graphs.clear()
                self._sources.clear()
            self._sources[name] = None
            return None, key
        sources = self._sources[name]
        if sources is None:
            sources = self._sources[name] = many.Sources(tensors, parts, self._inputs.memory)
        return (sources, name) if sources.is_usable else (None, key)


class StagingBuffer:
    """Memory for copies, which have the same addresses each time if they are made in the same order."""

    def __init__(self) -> None:
        self.used = 0
        """Bytes; setting it back releases the copies made since."""
        self._wanted = 0
        self.memory = torch.empty(0, dtype=torch.uint8)

    @property
    def has_room(self) -> bool:
        """Whether all copies since the last ``clear`` fit in this memory."""
        return self.used <= len(self.memory)

    def keep(self, *groups: Sequence[Tensor]) -> list[Tensor]:
        """Return copies without gaps; in separate memory if they do not fit yet. All are on one device.

        The tensors of a group have the same shape, strides and dtype, and are concatenated along the first dimension.
        """
        found, parts = self.place(*groups)
        foreach_copy_(parts, [tensor for group in groups for tensor in group])
        return found

    def place(self, *groups: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Reserve memory for copies of groups; return it as one tensor per group, and as one view per tensor."""
        found, parts = list[Tensor](), list[Tensor]()
        for group in groups:
            whole, places = self._place(group[0], len(group))
            found.append(whole)
            parts += places
        return found, parts

    def _place(self, tensor: Tensor, number: int) -> tuple[Tensor, list[Tensor]]:
        begin = self.used + -self.used % ALIGNMENT_BYTES
        end = self.used = begin + number * tensor.nbytes
        self._wanted = max(self._wanted, end)
        if self.memory.device != tensor.device:
            self.memory = self.memory.new_empty(0, device=tensor.device)
        has_room = len(self.memory) >= end
        flat = self.memory[begin:end].view(tensor.dtype) if has_room else tensor.new_empty(number * tensor.numel())
        like = torch.empty_like(tensor, device="meta")
        if number == 1:
            whole = flat.as_strided(tensor.shape, like.stride())
            return whole, [whole]
        first = tensor.shape[0]
        if like.stride(0) * first != tensor.numel():
            like = torch.empty(tensor.shape, device="meta")
        whole = flat.as_strided((number * first, *tensor.shape[1:]), like.stride())
        return whole, list(torch.split(whole, first))

    def clear(self) -> None:
        """Release all copies, and grow to the largest size that was needed so far."""
        self.used = 0
        if len(self.memory) < self._wanted:
            self.memory = self.memory.new_empty(self._wanted)
