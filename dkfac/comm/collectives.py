"""Collectives on flat contiguous buffers: the only calls of torch.distributed that move tensors.

Input: a buffer and a process group. Output: a :class:`Pending`. Owns: nothing. gloo silently corrupts buffers that are
not contiguous, so every function checks.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dkfac.ops.graph_cache import runs_between_graphs

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in 2.13


@dataclass(slots=True)
class Pending:
    """A collective that was launched. ``wait`` returns its result; on CUDA only the current stream waits."""

    work: Any
    finish: Callable[[], Tensor]
    how: str
    on_host: bool
    """Whether ``wait`` blocks the host."""
    begin: float = field(default_factory=time.perf_counter)

    def wait(self) -> Tensor:
        if self.work is not None:
            guard(self.work, self.on_host)
        result = self.finish()
        if listener is not None:
            listener(self.how, self.begin, time.perf_counter())
        return result


def _launch(start: Callable[[], Any], finish: Callable[[], Tensor], how: str, flat: Tensor) -> Pending:
    """Start a collective. While a CUDA graph is captured, it is left out of it, and runs at each replay instead."""
    on_host = flat.device.type == "cpu"
    if runs_between_graphs(lambda: start().wait()):
        return Pending(None, finish, how, on_host)
    return Pending(start(), finish, how, on_host)


def plain_wait(work: Any, on_host: bool) -> None:
    work.wait()


guard: Callable[[Any, bool], None] = plain_wait
"""Waits for a collective; ``hangs.py`` replaces it by one that can be interrupted."""

listener: Callable[[str, float, float], None] | None = None
"""Called with the kind of each collective, when it was launched and when it was complete."""


def all_reduce(flat: Tensor, group: Any) -> Pending:
    _check(flat)
    return _launch(lambda: dist.all_reduce(flat, group=group, async_op=True), lambda: flat, "all-reduce", flat)


def largest(flat: Tensor, group: Any) -> Pending:
    """Return the largest value of all ranks, element by element."""
    _check(flat)
    how = functools.partial(dist.all_reduce, flat, op=dist.ReduceOp.MAX, group=group, async_op=True)
    return _launch(how, lambda: flat, "all-reduce", flat)


def reduce_scatter(flat: Tensor, group: Any, accumulate: torch.dtype) -> Pending:
    """Return this rank's chunk of the sum.

    On the CPU, and for half precision anywhere, the chunks are exchanged and added in rank order, in ``accumulate``:
    gloo's own reduce-scatter sends as much as an all-reduce, and NCCL's accumulates in half precision.
    """
    _check(flat)
    world = dist.get_world_size(group)
    assert flat.numel() % world == 0
    if flat.device.type == "cpu" or flat.dtype.itemsize < 4:
        received = torch.empty_like(flat)
        return _launch(
            lambda: dist.all_to_all_single(received, flat, group=group, async_op=True),
            lambda: received.view(world, -1).sum(0, dtype=accumulate),
            "reduce-scatter",
            flat,
        )
    chunk = flat.new_empty(flat.numel() // world)
    start = functools.partial(_reduce_scatter, chunk, flat, group=group, async_op=True)
    return _launch(start, lambda: chunk.to(accumulate), "reduce-scatter", flat)


def exchange(chunk: Tensor, send: list[int], receive: list[int], group: Any) -> Pending:
    """Send ``send[i]`` elements to rank i of the group; return what the ranks sent here, in their order."""
    _check(chunk)
    received = chunk.new_empty(sum(receive))
    start = functools.partial(dist.all_to_all_single, received, chunk, receive, send, group=group, async_op=True)
    return _launch(start, lambda: received, "all-to-all", chunk)


def broadcast_from(flat: Tensor, root: int, group: Any) -> Pending:
    """``root``: the global rank, as in torch.distributed."""
    _check(flat)
    return _launch(lambda: dist.broadcast(flat, root, group=group, async_op=True), lambda: flat, "broadcast", flat)


def all_gather(chunk: Tensor, group: Any) -> Pending:
    """Return the chunks of all ranks of the group, in their order."""
    _check(chunk)
    gathered = chunk.new_empty(chunk.numel() * dist.get_world_size(group))
    start = functools.partial(_all_gather, gathered, chunk, group=group, async_op=True)
    return _launch(start, lambda: gathered, "all-gather", chunk)


def _check(flat: Tensor) -> None:
    assert flat.ndim == 1, "only flat buffers are sent"
    assert flat.is_contiguous(), "only contiguous buffers are sent"
