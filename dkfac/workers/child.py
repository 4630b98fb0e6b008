"""The child process of a helper rank: measure factors at weights it receives, or decompose factors it receives.

Input: weights or batch factors from the hub. Output: batch factors or decompositions, sent back to it. Owns: a copy of
the model; an inverse worker also the running factors of its layers.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from dkfac.capture.collector import Collector
from dkfac.capture.hooks import CaptureContext
from dkfac.comm.messages import largest_message
from dkfac.config.settings import Settings
from dkfac.decompose import layer_factors
from dkfac.decompose.sent_decompositions import pack_decomposition
from dkfac.factors.batch_factors import by_layer_and_key, finish_alone
from dkfac.factors.layer_state import Average, LayerState, whole_means
from dkfac.layers.find import find_layers, unwrap
from dkfac.layers.layer import Layer
from dkfac.workers.channel import AuthenticationError, Channel
from dkfac.workers.hub import START_BYTES, connect_to_hub

Build = Callable[[], nn.Module]
Batches = Callable[[int], tuple[Any, Any]]
Loss = Callable[[Any, Any], Tensor]
NamedFactors = dict[str, dict[str, Tensor]]


def work(
    role: str,
    number: int,
    address: tuple[str, int],
    secret: bytes,
    build: Build,
    batches: Batches | None,
    loss: Loss | None,
    device: str = "cpu",
) -> None:
    """The main function of the child process. Serves requests until the hub closes the connection."""
    torch.set_num_threads(1)
    channel = connect_to_hub(address, secret, role, number)
    try:
        message = _next(channel, START_BYTES)
        if message is None:
            return
        (described, layers, count), place = message, torch.device(device)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        settings, model = Settings(**described), build().to(place)
        if role == "statistics":
            assert batches is not None
            assert loss is not None
            serve: Any = Statistics(model, settings, lambda step: batches(step * count + number), loss, place)
        else:
            serve = Inverses(model, settings, place)
        compare(serve.layers, layers)
        largest = largest_message(model, (layer.spec for layer in serve.layers.values()))
        while (message := _next(channel, largest)) is not None:
            label, content = message
            channel.send(("done", label, serve(label, content)))
    except Exception as error:
        with contextlib.suppress(OSError):
            channel.send(("error", -1, f"{type(error).__name__}: {error}"))
        raise


def _next(channel: Channel, largest: int) -> Any | None:
    """Return the next message, or None when training has ended."""
    try:
        return channel.receive(lambda: largest)
    except AuthenticationError:
        raise
    except (EOFError, OSError):
        return None


def compare(layers: dict[str, Layer], wanted: dict[str, dict[str, Any]]) -> None:
    """Raise if the layers of this model are not those of the gradient workers, given as dicts of plain values."""
    mine = {name: json.loads(json.dumps(asdict(layer.spec))) for name, layer in layers.items()}
    for name in [*wanted, *mine]:
        if mine.get(name) != wanted.get(name):
            raise ValueError(
                f"layer {name!r} is {wanted.get(name)} on the gradient workers and {mine.get(name)} here: build() must "
                f"return the model that trains, with the same parameters frozen and all of them in the optimizer"
            )


def moved_to(device: torch.device, value: Any) -> Any:
    """Return a tensor, or the tensors of a dict, list or tuple, on a device."""
    match value:
        case _ if device.type == "cpu":
            return value
        case Tensor():
            return value.to(device)
        case dict():
            return {key: moved_to(device, item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(moved_to(device, item) for item in value)
    return value


class Statistics:
    """Measures batch factors on this worker's own batches at the weights of a step."""

    def __init__(
        self, model: nn.Module, settings: Settings, batches: Batches, loss: Loss, device: torch.device
    ) -> None:
        self.model, self.batches, self.loss, self.device = model, batches, loss, device
        rhythm: dict[str, Any] = {"factor_interval": 1, "inverse_interval": 1, "warmup_refresh": None}
        extra = replace(settings.experimental, inverse_backend="auto", basis_dtype="float32")
        own = replace(settings, **rhythm, inverse_lag=0, strategy="auto", announce=False, experimental=extra)
        if own.takes_steps:  # their step is not taken here
            own = replace(own, curvature="kfac")
        layers, _ = find_layers(unwrap(model), own, None)
        self.layers = {layer.name: layer for layer in layers}
        self.collector = Collector(layers, own)
        self.context = CaptureContext(self.collector, own, has_scaler=False)
        self.context.attach(unwrap(model))

    def __call__(self, step: int, weights: dict[str, Tensor]) -> NamedFactors:
        self.model.load_state_dict(weights)
        self.model.zero_grad()
        x, y = (moved_to(self.device, part) for part in self.batches(step))
        self.loss(self.model(x), y).backward()  # type: ignore[no-untyped-call]
        measured = self.collector.take()
        with torch.no_grad():
            found = by_layer_and_key(finish_alone(measured, measured.layers, float(measured.terms))[0])
        self.collector.begin_step(step + 1, None)
        self.collector.forget_terms()
        self.context.begin_step(measuring=True)
        return found


class Inverses:
    """Holds the running factors of some layers and decomposes them."""

    def __init__(self, model: nn.Module, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        layers, _ = find_layers(model, settings, None)
        self.layers = {layer.name: layer for layer in layers}
        self.states = {layer.name: LayerState(len(layer.spec.factors)) for layer in layers}

    def __call__(self, step: int, content: tuple[dict[str, Any], NamedFactors]) -> dict[str, Any]:
        """Update the running factors with batch factors. Returns, by layer, the outcomes of the decompositions, the
        packed decompositions and the mean eigenvalues."""
        schedules, factors = content[0], moved_to(self.device, content[1])
        self.settings = replace(self.settings, **schedules)
        good = torch.ones((), dtype=torch.bool, device=self.device)
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
        state.means = whole_means(layer_factors.live_means(layer, state))
        found = layer_factors.decompose(layer, state, list(state.running), self.settings, step)
        outcomes = {key: outcome for key, (_, outcome) in found.items()}
        flats = {}
        for key, (decomposition, outcome) in found.items():
            if decomposition is not None and outcome not in ("kept", "raw"):
                state.decompositions[key] = decomposition
                flats[key] = pack_decomposition(decomposition, packs=self.settings.uses_inverses)
        return outcomes, flats, state.means
