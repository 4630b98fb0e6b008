"""What a helper's child process does: measure factors at the weights it is sent, or decompose factors it is sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from dkfac import stages
from dkfac.crew.hub import connect, receive, send
from dkfac.kfac import KFAC
from dkfac.layers.find import find_layers
from dkfac.layers.layer import Layer
from dkfac.plan.spec import LayerSpec
from dkfac.reduce import finish_alone
from dkfac.settings import Settings
from dkfac.shares import pack_decomposition
from dkfac.state import Average, LayerState

Build = Callable[[], nn.Module]
Batches = Callable[[int], tuple[Any, Any]]
Loss = Callable[[Any, Any], Tensor]
Named = dict[str, dict[str, Tensor]]


def work(
    role: str,
    number: int,
    address: tuple[str, int],
    key: bytes,
    build: Build,
    batches: Batches | None,
    loss: Loss | None,
) -> None:
    """The child's main: serve until the hub closes the connection."""
    torch.set_num_threads(1)
    connection = connect(address, key, role, number)
    try:
        message = _next(connection)
        if message is None:
            return
        settings, layers, count = message
        if role == "statistics":
            assert batches is not None
            assert loss is not None
            serve: Any = Statistics(build(), settings, lambda step: batches(step * count + number), loss)
        else:
            serve = Inverses(build(), settings)
        compare(serve.layers, layers)
        while (message := _next(connection)) is not None:
            label, content = message
            send(connection, ("done", label, serve(label, content)))
    except Exception as error:
        with contextlib.suppress(OSError):
            _tell(connection, error)
        raise


def _next(connection: Connection) -> Any | None:
    """Return the next message; None when training has ended."""
    try:
        return receive(connection)
    except (EOFError, OSError):
        return None


def compare(layers: dict[str, Layer], wanted: dict[str, LayerSpec]) -> None:
    """Refuse a model whose layers are not those of the gradient workers."""
    mine = {name: layer.spec for name, layer in layers.items()}
    for name in [*wanted, *mine]:
        if mine.get(name) != wanted.get(name):
            raise ValueError(
                f"layer {name!r} is {wanted.get(name)} on the gradient workers and {mine.get(name)} here: build() must "
                f"return the model that trains, with the same parameters frozen and all of them in the optimizer"
            )


def _tell(connection: Connection, error: Exception) -> None:
    send(connection, ("error", -1, f"{type(error).__name__}: {error}"))


class Statistics:
    """Batch factors of this worker's own batches at the weights of a step."""

    def __init__(self, model: nn.Module, settings: Settings, batches: Batches, loss: Loss) -> None:
        self.model, self.batches, self.loss = model, batches, loss
        rhythm: dict[str, Any] = {"factor_interval": 1, "inverse_interval": 1, "warmup_refresh": None}
        own = replace(settings, **rhythm, inverse_lag=0, inverse_backend="auto", strategy="auto", announce=False)
        if own.takes_steps:  # whose step is not taken here
            own = replace(own, curvature="kfac", basis_dtype="float32")
        self.kfac = KFAC(model, settings=own)
        self.layers = {layer.name: layer for layer in self.kfac.layers}

    def __call__(self, step: int, weights: dict[str, Tensor]) -> Named:
        self.model.load_state_dict(weights)
        self.model.zero_grad()
        x, y = self.batches(step)
        self.loss(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        runner = self.kfac._runner
        measured = runner.tape.take()
        with torch.no_grad():
            found = finish_alone(runner, measured, measured.layers, float(measured.terms))
        runner.step = step + 1
        self.kfac._plan_next()
        return found


class Inverses:
    """Running factors of some layers and their decompositions."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.settings = settings
        layers, _ = find_layers(model, settings, None)
        self.layers = {layer.name: layer for layer in layers}
        self.states = {layer.name: LayerState(len(layer.spec.factors)) for layer in layers}

    def __call__(self, step: int, content: tuple[dict[str, Any], Named]) -> dict[str, Any]:
        """Absorb batch factors and return, by layer, how decompositions went, what they are, flat, and the means."""
        schedules, factors = content
        self.settings = replace(self.settings, **schedules)
        good = torch.ones((), dtype=torch.bool)
        result: dict[str, Any] = {}
        for name, batch in factors.items():
            layer, state = self.layers[name], self.states[name]
            if not all(bool(torch.isfinite(value).all()) for value in batch.values()):
                continue
            decay = self.settings.at("factor_decay", step)
            for key, value in batch.items():
                state.running.setdefault(key, Average.empty(value)).update(value, decay, good)
            result[name] = self._decompose(layer, state, step)
        return result

    def _decompose(self, layer: Layer, state: LayerState, step: int) -> tuple[Any, Any, Any]:
        state.means = stages.live_means(layer, state)
        found = stages.decompose(layer, state, list(state.running), self.settings, step)
        rungs = {key: rung for key, (_, rung) in found.items()}
        flats = {}
        for key, (decomposition, rung) in found.items():
            if decomposition is not None and rung not in ("kept", "raw"):
                state.decompositions[key] = decomposition
                flats[key] = pack_decomposition(decomposition, self.settings.solver)
        return rungs, flats, state.means
