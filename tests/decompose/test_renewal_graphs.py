"""A refresh on ranks is replayed from graphs, with the collectives between them.

Graphs are acted on the CPU: the operations between two collectives are noted with the tensors they used, and a replay
runs them again on these tensors. Whatever the function decides or computes on the host stays as it was.
"""

import functools
from contextlib import nullcontext

import pytest
import torch
from helpers_parity import train
from helpers_ranks import on_threads
from torch.utils._python_dispatch import TorchDispatchMode

from dkfac.ops import graph_cache
from dkfac.runtime import engine

RHYTHM = {"factor_interval": 1, "inverse_interval": 2}


class Noted(TorchDispatchMode):
    """Runs operations and notes them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, found))
        return found

    def replay(self):
        for func, args, kwargs, before in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(flat(before), flat(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # else a view, or what was written in place
                    old.copy_(new)


def flat(found):
    found = found if isinstance(found, (list, tuple)) else [found]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


class ActedPieces(graph_cache.Pieces):
    """Runs at once what a real one only captures, so the first replay does nothing."""

    replays = cuts = 0

    def begin(self):
        self._noted, self._is_fresh = Noted(), True
        self._noted.__enter__()

    def end(self):
        self._noted.__exit__(None, None, None)
        self._work.append(self._noted.replay)

    def cut(self, work):
        type(self).cuts += 1
        self.end()
        work()
        self._work.append(work)
        self.begin()

    def replay(self):
        type(self).replays += 1
        if not self._is_fresh:
            super().replay()
        self._is_fresh = False


class Stream:
    def wait_stream(self, other):
        """As a stream does."""


@pytest.fixture
def no_streams(monkeypatch):
    """Capture where there is no CUDA."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())


@pytest.fixture
def acted(monkeypatch, no_streams):
    def capture(self, function, device):
        return graph_cache.capture(function, None, device, Stream())

    monkeypatch.setattr(ActedPieces, "replays", 0)
    monkeypatch.setattr(ActedPieces, "cuts", 0)
    monkeypatch.setattr(graph_cache, "Pieces", ActedPieces)
    monkeypatch.setattr(graph_cache.GraphPool, "capture", capture)
    monkeypatch.setattr(engine, "has_one_gpu", lambda _: True)
    # Only the refresh: this way of acting has no data of its own for what changes from step to step.
    monkeypatch.setattr(engine.StepGraph, "begin", lambda *_: None)
    return ActedPieces


@pytest.mark.parametrize(
    "options",
    [
        {"solver": "warm-eigen", "curvature": "adaptive"},
        {"solver": "warm-eigen", "curvature": "kfac", "strategy": "replicated"},
        {"solver": "cholesky"},
        {"solver": "warm-eigen", "curvature": "adaptive", "net": "wide", "block_dim": 8},
        {"solver": "warm-eigen", "curvature": "adaptive", "spread_refresh": 2, "inverse_interval": 4},
    ],
    ids=str,
)
def test_ranks_replay_a_refresh(options, acted):
    job = functools.partial(train, world_size=2, **{"strategy": "comm-opt"} | RHYTHM | options)
    expected = on_threads(2, functools.partial(job, cuda_graph=False))
    assert acted.replays == 0
    found = on_threads(2, functools.partial(job, cuda_graph=True))
    assert acted.replays >= 10
    assert acted.cuts >= 4, "means and status, on two ranks"
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_what_is_launched_between_graphs_runs_at_each_replay(monkeypatch, no_streams):
    log = []

    class Graph:
        def capture_begin(self, **_):
            log.append("begin")

        def capture_end(self):
            log.append("end")

        def replay(self):
            log.append("replay")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)

    def function():
        log.append("first")
        assert graph_cache.runs_between_graphs(lambda: log.append("work"))
        log.append("second")
        return 7

    pieces, found = graph_cache.capture(function, None, torch.device("cpu"), Stream())
    assert found == 7
    assert log == ["begin", "first", "end", "begin", "second", "end"]
    log.clear()
    pieces.replay()
    assert log == ["replay", "work", "replay"]
    assert not graph_cache.runs_between_graphs(lambda: log.append("work"))
