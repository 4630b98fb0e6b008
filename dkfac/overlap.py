"""Reduce factors while forward and backward run: launch times alone, never another numerical path.

Buckets leave strictly in the plan's order, each when its factors are ready; the step's pre-hook launches the rest. It
acts in passes whose gradients DDP will synchronise, on layers that every rank called once per pass when first measured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dkfac.comm import groups
from dkfac.exchange import Exchange
from dkfac.layers.layer import Layer
from dkfac.layers.rows import rows_of
from dkfac.reduce import over_terms
from dkfac.sums import input_sum
from dkfac.tape import Tape


class Overlap:
    """What is ready of the pass that runs now, and what has left."""

    def __init__(self, exchange: Exchange, tape: Tape, layers: frozenset[str]) -> None:
        self._exchange, self._tape = exchange, tape
        self.layers = layers
        """Layers that leave early; agreed upon at the first refresh."""
        self.active = False
        """Whether the pass that runs now will be synchronised."""
        self._inputs: dict[str, tuple[Tensor, Tensor | float]] = {}
        """Sums over inputs and their rows, measured in the forward, until the backward takes them."""
        self._ready: set[tuple[str, str]] = set()
        self._needed: list[set[tuple[str, str]]] = [set() for _ in range(exchange.num_buckets)]
        for transfer in (t for t in exchange.program.stage("factors") if t.how != "rows"):
            self._needed[transfer.bucket] |= {(part.layer, part.key) for part in transfer.parts}

    def begin_forward(self) -> None:
        """Before the model's forward: will DDP synchronise its backward?"""
        will_synchronise = bool(self.layers) and groups.ddp_will_synchronise()
        if will_synchronise:
            self._tape.drop_void()
            self.reset()
        self.active = will_synchronise

    def reset(self) -> None:
        """Forget a pass that no step followed."""
        self._inputs.clear()
        self._ready.clear()
        if self.active:
            self.active = False
            self._exchange.drop_launched()

    def end(self) -> None:
        """The step has been taken."""
        self.active = False
        self._inputs.clear()
        self._ready.clear()

    def measure_input(self, layer: Layer, x: Tensor, output: Tensor, examples: int) -> None:
        """In a layer's forward: sum its A and launch what is ready."""
        if not self.active or layer.name not in self.layers or torch._C._current_graph_task_id() != -1:
            return
        if layer.name in self._inputs:
            self._tape.error = self._tape.error or _called_again(layer.name)
            return
        if layer.spec.factors[0].key != "A" or (layer.name, "A") in self._tape.as_rows:
            return
        tape = self._tape
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False), tape.timer.stage("capture", x.device):
            total: Tensor | None = None
            count: Tensor | float = 0.0
            dim = tape.settings.batch_dim
            y, sample = output.detach(), tape.sample
            for rows in rows_of(layer, x, y, examples=examples, batch_dim=dim, batch_stats=False, sample=sample):
                value, number = input_sum(layer, layer.spec.factors[0], rows, tape.next_mask, tape.settings)
                total = value if total is None else total.add_(value)
                count = count + number
        if total is not None:
            self._inputs[layer.name] = (total, count)
            self._note(layer.name, "A")

    def take_input(self, name: str) -> tuple[Tensor, Tensor | float] | None:
        """In a layer's backward: what its forward measured, once."""
        return self._inputs.pop(name, None) if self.active else None

    @property
    def has_inputs(self) -> bool:
        return bool(self._inputs)

    def note_recorded(self, layer: Layer, *, called_again: bool) -> None:
        """After a layer's backward: all its factors are ready."""
        if not self.active or layer.name not in self.layers:
            return
        if called_again:
            raise _called_again(layer.name)
        for factor in layer.spec.factors:
            self._note(layer.name, factor.key)

    def _note(self, name: str, key: str) -> None:
        self._ready.add((name, key))
        exchange = self._exchange
        while exchange.num_launched < exchange.num_buckets and self._needed[exchange.num_launched] <= self._ready:
            sums = {item: self._sum(*item) for item in self._needed[exchange.num_launched]}
            exchange.launch_early(sums)

    def _sum(self, name: str, key: str) -> Tensor:
        sums = self._tape.window.layers.get(name)
        total = None if sums is None else sums.factors.get(key)
        if key == "A" and name in self._inputs:
            early = self._inputs[name][0]
            total = early if total is None else total + early
        assert total is not None
        return over_terms(key, total, self._tape.unit())


def _called_again(name: str) -> RuntimeError:
    return RuntimeError(
        f"layer {name!r} was called several times in a pass, once per pass before: with overlap=True its factors have "
        f"left already. Use overlap=False."
    )
