"""Reduce factors while the forward and backward pass run. Only launch times change, never the numerical path.

Input: factors as soon as a layer has measured them. Output: collectives launched on the transport. Owns: which factors
of the current pass are ready.

Buckets are launched strictly in plan order, each when its factors are ready; the optimizer's pre-hook launches the
rest. Active only in passes whose gradients DDP will synchronize, and for layers that every rank called once per pass
when they were first measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dkfac.capture.collector import Collector
from dkfac.capture.outer_products import input_sum
from dkfac.comm import groups
from dkfac.comm.errors import ErrorChannel
from dkfac.comm.transport import Transport
from dkfac.factors.batch_factors import over_terms
from dkfac.layers.layer import Layer
from dkfac.layers.rows import rows_of
from dkfac.ops.torch_private import current_graph_task_id


class Overlap:
    """Tracks which factors of the current pass are ready, and launches their buckets."""

    def __init__(
        self, transport: Transport, collector: Collector, errors: ErrorChannel, layers: frozenset[str] = frozenset()
    ) -> None:
        self._transport, self._collector, self._errors = transport, collector, errors
        self.layers = layers
        """Layers whose factors are reduced early; agreed on at the first refresh."""
        self.active = False
        """Whether DDP will synchronize the gradients of the current pass."""
        self._inputs: dict[str, tuple[Tensor, Tensor | float]] = {}
        """Sums over inputs and their rows, measured in the forward pass, until the backward pass takes them."""
        self._ready: set[tuple[str, str]] = set()
        self._needed: list[set[tuple[str, str]]] = []
        self.follow()

    def follow(self) -> None:
        """Read the transport's program again after it changed."""
        self._needed = [set() for _ in range(self._transport.num_buckets)]
        for transfer in (t for t in self._transport.program.stage("factors") if t.how != "rows"):
            self._needed[transfer.bucket] |= {(part.layer, part.key) for part in transfer.parts}

    def choose(self, layers: frozenset[str]) -> None:
        """Reduce the factors of these layers early: all ranks called them once per pass."""
        self.layers = layers

    def begin_forward(self) -> None:
        """Called before the model's forward: check whether DDP will synchronize its backward pass."""
        will_synchronise = bool(self.layers) and groups.ddp_will_synchronise()
        if will_synchronise:
            self._collector.drop_void()
            self.reset()
        self.active = will_synchronise

    def reset(self) -> None:
        """Discard a pass that was not followed by a step."""
        self._inputs.clear()
        self._ready.clear()
        if self.active:
            self.active = False
            self._transport.drop_launched()

    def end(self) -> None:
        """Called after the step."""
        self.active = False
        self._inputs.clear()
        self._ready.clear()

    def measure_input(self, layer: Layer, x: Tensor, output: Tensor, examples: int) -> None:
        """Called in a layer's forward: sum its A factor and launch the buckets that are ready."""
        if not self.active or layer.name not in self.layers or current_graph_task_id() != -1:
            return
        if layer.name in self._inputs:
            self._errors.keep(_called_again(layer.name))
            return
        if len(layer.spec.side("A")) != 1 or (layer.name, "A") in self._collector.as_rows:
            return
        collector = self._collector
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False), collector.timer.stage("capture", x.device):
            total: Tensor | None = None
            count: Tensor | float = 0.0
            dim = collector.settings.batch_dim
            y, sample = output.detach(), collector.sample
            for rows in rows_of(layer, x, y, examples=examples, batch_dim=dim, batch_stats=False, sample=sample):
                value, number = input_sum(layer, layer.spec.factors[0], rows, collector.next_mask, collector.settings)
                total = value if total is None else total.add_(value)
                count = count + number
        if total is not None:
            self._inputs[layer.name] = (total, count)
            self._note(layer.name, "A")

    def take_input(self, name: str) -> tuple[Tensor, Tensor | float] | None:
        """Called in a layer's backward: return, once, what its forward measured."""
        return self._inputs.pop(name, None) if self.active else None

    @property
    def has_inputs(self) -> bool:
        return bool(self._inputs)

    def note_recorded(self, layer: Layer, *, called_again: bool) -> None:
        """Called after a layer's backward: all its factors are ready."""
        if not self.active or layer.name not in self.layers:
            return
        if called_again:
            raise _called_again(layer.name)
        for factor in layer.spec.factors:
            self._note(layer.name, factor.key)

    def _note(self, name: str, key: str) -> None:
        self._ready.add((name, key))
        transport = self._transport
        while transport.num_launched < transport.num_buckets and self._needed[transport.num_launched] <= self._ready:
            sums = {item: self._sum(*item) for item in self._needed[transport.num_launched]}
            transport.launch_early(sums)

    def _sum(self, name: str, key: str) -> Tensor:
        sums = self._collector.window.layers.get(name)
        total = None if sums is None else sums.factors.get(key)
        if key == "A" and name in self._inputs:
            early = self._inputs[name][0]
            total = early if total is None else total + early
        assert total is not None
        return over_terms(key, total, self._collector.grad_correction())


def _called_again(name: str) -> RuntimeError:
    return RuntimeError(
        f"layer {name!r} was called several times in a pass, once per pass before: with overlap=True its factors have "
        f"left already. Use overlap=False."
    )
