"""Decompositions that are computed beside the steps to come, and used from an agreed step on: ``inverse_lag``."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac import shares, stages
from dkfac.layers.layer import Layer
from dkfac.ops.decompose import Decomposition, from_tensors
from dkfac.settings import SCHEDULES, Settings
from dkfac.state import Average, LayerState

if TYPE_CHECKING:
    from dkfac.run import Runner

MOST_THREADS = 4
Means = dict[str, dict[str, Tensor]]
"""Mean eigenvalues by layer and factor."""


@dataclass(slots=True)
class Begun:
    """One refresh under way."""

    since: int
    """The step of the factors."""
    layers: list[Layer]
    states: dict[str, LayerState]
    """Copies of the factors that this rank holds, with their means and the decompositions to start from."""
    settings: Settings
    """With schedules as they were then."""
    found: shares.Found = field(default_factory=dict)
    error: BaseException | None = None
    work: dict[str, Future[Any]] = field(default_factory=dict)


class Later:
    """At most one refresh under way, its results due at an agreed step."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pool: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.begun: Begun | None = None
        self.rounds = False
        """Whether a switch of the process rounds products on a GPU, outside of K-FAC's own work."""
        self._due = -1

    def is_due(self, step: int) -> bool:
        return self.begun is not None and step >= self._due

    def begin(self, runner: Runner, layers: list[Layer], means: Means) -> None:
        """Copy the factors that this rank holds and begin with those that it decomposes. What goes wrong is raised
        where the results are due, on all ranks."""
        if not layers:
            return
        try:
            self.restart(runner, self._copy(runner, layers, means))
        except Exception as caught:
            if runner.exchange is None:
                raise
            settings = frozen(runner.settings, runner.step)
            self.begun, self._due = Begun(runner.step, layers, {}, settings, error=caught), runner.step
            self._due += settings.inverse_lag

    def _copy(self, runner: Runner, layers: list[Layer], means: Means) -> Begun:
        states = {}
        for layer in layers:
            state = runner.states[layer.name]
            running = {key: Average(a.value.clone(), a.weight.clone()) for key, a in state.running.items()}
            own = dict(state.decompositions)
            states[layer.name] = LayerState(state.num_factors, running, own, means[layer.name])
        return Begun(runner.step, layers, states, frozen(runner.settings, runner.step))

    def restart(self, runner: Runner, begun: Begun) -> None:
        """Begin with what was copied or loaded; results hold from the lag's step on, or from now if that is past."""
        self.begun, self._due = begun, max(begun.since + self._settings.inverse_lag, runner.step)
        for layer in begun.layers:
            keys = shares.decomposed_here(runner, layer)
            begun.work[layer.name] = self._start(layer, begun.states[layer.name], keys, begun)

    def take(self, runner: Runner) -> Begun:
        """Return the results, waiting for those that are late."""
        begun = self.begun
        assert begun is not None
        self.begun = None
        if not all(future.done() for future in begun.work.values()):
            runner.counters["late"] += 1
        for layer in begun.layers if begun.error is None else ():
            try:
                found, done = begun.work[layer.name].result()
                begun.found[layer.name] = _here(found, done, layer)
            except Exception as caught:
                if runner.exchange is None:
                    raise
                begun.error = begun.error or caught
        return begun

    def forget(self) -> None:
        """Let nothing come of what is under way."""
        self.begun = None

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint says of it."""
        begun = self.begun
        found: dict[str, Any] = {}
        if begun is not None and begun.error is None:
            schedules = {name: begun.settings.at(name, begun.since) for name in SCHEDULES}
            found = {"begun": begun.states, "begun_at": begun.since, "begun_schedules": schedules}
        return {"lag": self._settings.inverse_lag > 0, **found}

    def close(self) -> None:
        self.forget()
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _start(self, layer: Layer, state: LayerState, keys: list[str], begun: Begun) -> Future[Any]:
        settings, since, device = begun.settings, begun.since, layer.weight.device
        backend = choose_backend(settings, device, rounds=self.rounds)
        ready: torch.cuda.Event | None = None
        stream: torch.cuda.Stream | None = None
        if backend == "threads" and device.type == "cuda":
            state = _on_cpu(state, with_decompositions=settings.solver == "warm-eigen")
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


def choose_backend(settings: Settings, device: torch.device, *, rounds: bool) -> str:
    """Return where decompositions are computed: on a stream only where no switch of the process rounds products."""
    if settings.inverse_backend != "auto":
        return settings.inverse_backend
    return "stream" if device.type == "cuda" and not (rounds or settings.tf32) else "threads"


def frozen(settings: Settings, step: int) -> Settings:
    """Return settings with schedules as they are at a step."""
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
    """Return what decomposes a layer's factors, on whatever thread: results, and an event of the device."""

    def work() -> tuple[Any, torch.cuda.Event | None]:
        torch.get_num_threads()  # lets this thread have as many as the others: results must be the same
        with torch.no_grad():
            if stream is None:
                if ready is not None:
                    ready.synchronize()
                return stages.decompose(layer, state, keys, settings, since), None
            with torch.cuda.stream(stream):
                if ready is not None:
                    stream.wait_event(ready)
                found = stages.decompose(layer, state, keys, settings, since)
                return found, stream.record_event()

    return work


def _here(found: Any, done: torch.cuda.Event | None, layer: Layer) -> Any:
    """Return results where the layer is, for the present stream to use."""
    device = layer.weight.device
    if done is not None:
        torch.cuda.current_stream(device).wait_event(done)
    result: dict[str, tuple[Decomposition | None, Any]] = {}
    for key, (decomposition, rung) in found.items():
        if decomposition is not None:
            moved = {name: t.to(device, layer.dtype) for name, t in decomposition.tensors().items()}
            if done is not None:
                for tensor in moved.values():
                    tensor.record_stream(torch.cuda.current_stream(device))
            decomposition = from_tensors(moved)
        result[key] = decomposition, rung
    return result


def _on_cpu(state: LayerState, *, with_decompositions: bool) -> LayerState:
    """Return a copy on the CPU; it is there when an event recorded after this call has passed."""

    def moved(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(
            tensor, non_blocking=True
        )

    running = {key: Average(moved(a.value), moved(a.weight)) for key, a in state.running.items()}
    own = dict(state.decompositions)
    for key, decomposition in state.decompositions.items() if with_decompositions else ():
        own[key] = from_tensors({name: moved(t) for name, t in decomposition.tensors().items()})
    return LayerState(state.num_factors, running, own, {key: moved(m) for key, m in state.means.items()})
