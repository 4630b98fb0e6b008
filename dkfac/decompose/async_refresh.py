"""Asynchronous refresh (``inverse_lag``): decompose in the background and use the results from an agreed step on.

Input: the running factors of one step. Output: their decompositions, a fixed number of steps later. Owns: the refresh
in flight, its threads and its CUDA streams.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dkfac.comm.transport import Transport
from dkfac.config.settings import SCHEDULES, Settings
from dkfac.config.step_context import StepContext
from dkfac.decompose import layer_factors
from dkfac.decompose.refresh_sync import Found, Means
from dkfac.factors.layer_state import Average, LayerState
from dkfac.layers.layer import Layer
from dkfac.layers.rank_plan import RankPlan
from dkfac.ops.decompose import Decomposition, from_tensors

MOST_THREADS = 4


@dataclass(slots=True)
class PendingRefresh:
    """One refresh in flight."""

    since: int
    """The step whose factors are decomposed."""
    layers: list[Layer]
    states: dict[str, LayerState]
    """Copies of the factors that this rank holds, with their means and the decompositions to start from."""
    settings: Settings
    """The settings, with every schedule fixed at its value at step ``since``."""
    found: Found = field(default_factory=dict)
    error: BaseException | None = None
    work: dict[str, Future[Any]] = field(default_factory=dict)
    is_late: bool = False
    """Whether ``take`` had to wait for a result."""


class AsyncRefresh:
    """Runs at most one refresh at a time in the background; its results are due at an agreed step."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pool: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.pending: PendingRefresh | None = None
        self.rounds = False
        self._due = -1

    def is_due(self, step: int) -> bool:
        return self.pending is not None and step >= self._due

    def begin(
        self,
        context: StepContext,
        layers: list[Layer],
        states: dict[str, LayerState],
        means: Means,
        ranks: RankPlan,
        transport: Transport,
    ) -> None:
        """Copy the factors that this rank holds and start decomposing those that it owns.

        With several ranks, an error is kept and raised on all of them at the step where the results are due; with one
        rank it is raised here.
        """
        if not layers:
            return
        try:
            self.restart(_copy(context, layers, states, means), context.step, ranks)
        except Exception as caught:
            settings = frozen(context.settings, context.step)
            self.pending = PendingRefresh(context.step, layers, {}, settings, error=transport.defer(caught))
            self._due = context.step + settings.inverse_lag

    def restart(self, pending: PendingRefresh, step: int, ranks: RankPlan) -> None:
        """Start decomposing factors that were copied or loaded. Results are due ``inverse_lag`` steps after the step of
        the factors, or at ``step`` if that has passed."""
        self.pending, self._due = pending, max(pending.since + self._settings.inverse_lag, step)
        for layer in pending.layers:
            keys = ranks.decomposes(layer)
            pending.work[layer.name] = self._start(layer, pending.states[layer.name], keys, pending)

    def take(self, transport: Transport) -> PendingRefresh:
        """Return the results of the refresh in flight, blocking until all of them are available."""
        pending = self.pending
        assert pending is not None
        self.pending = None
        pending.is_late = not all(future.done() for future in pending.work.values())
        for layer in pending.layers if pending.error is None else ():
            try:
                found, done = pending.work[layer.name].result()
                pending.found[layer.name] = _here(found, done, layer)
            except Exception as caught:
                pending.error = pending.error or transport.defer(caught)
        return pending

    def cancel(self) -> None:
        """Cancel the refresh in flight."""
        self.pending = None

    def note_rounding(self, rounds: bool) -> None:
        """Record whether a process-wide switch lets CUDA matrix products outside of K-FAC round to TF32."""
        self.rounds = rounds

    def saved(self) -> dict[str, Any]:
        """Return the entries that a checkpoint stores for the refresh in flight."""
        pending = self.pending
        found: dict[str, Any] = {}
        if pending is not None and pending.error is None:
            schedules = {name: pending.settings.at(name, pending.since) for name in SCHEDULES}
            found = {"begun": pending.states, "begun_at": pending.since, "begun_schedules": schedules}
        return {"lag": self._settings.inverse_lag > 0, **found}

    def close(self) -> None:
        self.cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _start(self, layer: Layer, state: LayerState, keys: list[str], pending: PendingRefresh) -> Future[Any]:
        settings, since, device = pending.settings, pending.since, layer.weight.device
        backend = choose_backend(settings, device, rounds=self.rounds)
        ready: torch.cuda.Event | None = None
        stream: torch.cuda.Stream | None = None
        if backend == "threads" and device.type == "cuda":
            state = _on_cpu(state, with_decompositions=settings.improves_bases)
        if device.type == "cuda":
            ready = torch.cuda.current_stream(device).record_event()
        if backend == "stream":
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        work = _worker(layer, state, keys, settings, since, ready, stream)
        if backend == "inline":
            future: Future[Any] = Future()
            try:
                future.set_result(work())
            except Exception as caught:
                future.set_exception(caught)
            return future
        if self._pool is None:
            number = 1 if backend == "stream" else (os.cpu_count() or 1) // (2 * torch.get_num_threads())
            self._pool = ThreadPoolExecutor(max(1, min(MOST_THREADS, number)), "dkfac-decompose")
        return self._pool.submit(work)


def _copy(context: StepContext, layers: list[Layer], states: dict[str, LayerState], means: Means) -> PendingRefresh:
    copies = {}
    for layer in layers:
        state = states[layer.name]
        running = {key: Average(a.value.clone(), a.weight.clone()) for key, a in state.running.items()}
        own = dict(state.decompositions)
        copies[layer.name] = LayerState(state.num_factors, running, own, means[layer.name])
    return PendingRefresh(context.step, layers, copies, frozen(context.settings, context.step))


def choose_backend(settings: Settings, device: torch.device, *, rounds: bool) -> str:
    """Return where decompositions are computed: ``"stream"``, ``"threads"`` or ``"inline"``. ``"auto"`` uses a stream
    only where no process-wide switch rounds matrix products to TF32."""
    if settings.experimental.inverse_backend != "auto":
        return settings.experimental.inverse_backend
    return "stream" if device.type == "cuda" and not (rounds or settings.tf32) else "threads"


def frozen(settings: Settings, step: int) -> Settings:
    """Return the settings with every schedule fixed at its value at ``step``."""
    numbers: dict[str, Any] = {name: settings.at(name, step) for name in SCHEDULES}
    return replace(settings, **numbers)


def _worker(
    layer: Layer,
    state: LayerState,
    keys: list[str],
    settings: Settings,
    since: int,
    ready: torch.cuda.Event | None,
    stream: torch.cuda.Stream | None,
) -> Callable[[], Any]:
    """Return a function that decomposes a layer's factors on any thread. It returns the results and a CUDA event that
    is recorded after them (None unless it ran on a stream)."""

    def work() -> tuple[Any, torch.cuda.Event | None]:
        torch.get_num_threads()  # gives this thread as many intra-op threads as the others: results must be the same
        with torch.no_grad():
            if stream is None:
                if ready is not None:
                    ready.synchronize()
                return layer_factors.decompose(layer, state, keys, settings, since), None
            with torch.cuda.stream(stream):
                if ready is not None:
                    stream.wait_event(ready)
                found = layer_factors.decompose(layer, state, keys, settings, since)
                return found, stream.record_event()

    return work


def _here(found: Any, done: torch.cuda.Event | None, layer: Layer) -> Any:
    """Return results on the layer's device, safe to use on the current stream."""
    device = layer.weight.device
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)
    result: dict[str, tuple[Decomposition | None, Any]] = {}
    for key, (decomposition, outcome) in found.items():
        if decomposition is not None:
            moved = {name: t.to(device, layer.dtype) for name, t in decomposition.tensors().items()}
            if done is not None:
                for tensor in moved.values():
                    tensor.record_stream(torch.cuda.current_stream(device))
            decomposition = from_tensors(moved)
        result[key] = decomposition, outcome
    return result


def _on_cpu(state: LayerState, *, with_decompositions: bool) -> LayerState:
    """Return a copy in pinned CPU memory. The copy is asynchronous: it is complete once an event that is recorded after
    this call has completed."""

    def moved(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
            tensor, non_blocking=True
        )

    running = {key: Average(moved(a.value), moved(a.weight)) for key, a in state.running.items()}
    own = dict(state.decompositions)
    for key, decomposition in state.decompositions.items() if with_decompositions else ():
        own[key] = from_tensors({name: moved(t) for name, t in decomposition.tensors().items()})
    return LayerState(state.num_factors, running, own, {key: moved(m) for key, m in state.means.items()})
