"""Layers of equal shape, stacked in common tensors so that one operation processes them all.

Input: layers and their states. Output: common tensors, of which the states hold views. Owns: the common tensors and the
gradient buffer.

Each layer keeps its own state, by name: it holds views of the common tensors, which are rebuilt if a state holds
something else (after a load, a fallback, a move to another device). Blocks are concatenated: to the operations in
``ops/``, n layers of B blocks are one layer of n * B blocks.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from dkfac.factors.layer_state import Adaptive, Average, LayerState
from dkfac.layers.layer import Layer, split_grad
from dkfac.ops.decompose import Decomposition, from_tensors
from dkfac.ops.together import aligned
from dkfac.ops.torch_private import foreach_copy_
from dkfac.plan.spec import is_input

NOTHING: Mapping[int, Tensor] = {}
MOST_ELEMENTS = {"cpu": 2**18}
"""By device type, the number of elements of a stack's gradients above which a stack has one layer. On a CPU, operations
on tensors that do not fit into the cache take longer than operations on each layer."""


def make_stacks(layers: Iterable[Layer]) -> list[Stack]:
    """Return the layers grouped by what must be equal for one operation to process them."""
    groups: dict[Any, list[Layer]] = {}
    for layer in layers:
        spec, weight = layer.spec, layer.weight
        alike = (layer.kind, spec.grad_shape, spec.factors, layer.has_bias, weight.dtype, weight.device)
        groups.setdefault(alike, []).append(layer)
    return [Stack(part) for group in groups.values() for part in _parts(group)]


def _parts(layers: list[Layer]) -> list[list[Layer]]:
    """Return layers of equal shape in groups that one operation processes well."""
    most = MOST_ELEMENTS.get(layers[0].weight.device.type)
    number = len(layers) if most is None else max(1, most // layers[0].spec.grad_elements)
    return [layers[i : i + number] for i in range(0, len(layers), number)]


class Stack:
    """Layers of equal shape, and the tensors they share."""

    def __init__(self, layers: list[Layer], *, pad: bool = True) -> None:
        self.layers, self.num_layers = layers, len(layers)
        self._pads, self._padded_sizes = pad, dict[int, int]()
        self.blocks, *sizes = layers[0].spec.grad_shape
        self.transposed = layers[0].kind == "conv1d-transposed"
        """Whether gradients are kept as ``[n, I, O]``, like the weight: transposing them twice would be slow."""
        if self.transposed:
            sizes.reverse()
        self.dtype, self.device = layers[0].dtype, layers[0].weight.device
        rows = self._pad(sizes[0]) if self.blocks == 1 else sizes[0]
        self.sizes, self.padded = sizes, [rows, self._pad(sizes[1])]
        """Rows are padded only if there is one block: the parameter, which has all of them, is a view of the buffer."""
        self.elements = self.blocks * sizes[0] * sizes[1]
        """The number of elements of one layer's gradient."""
        self.elements_laid_out = self.blocks * self.padded[0] * self.padded[1]
        """The same with padding."""
        self._averages: dict[str, tuple[list[Tensor], Tensor, Tensor]] = {}
        self._decompositions: dict[str, tuple[list[Decomposition], Decomposition]] = {}
        self._moments: dict[str, tuple[list[Tensor], Tensor, Tensor]] = {}
        self._adaptive: tuple[list[Adaptive], tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
        self._grads: Tensor | None = None
        self._parts: list[list[Tensor]] = []

    def _pad(self, size: int) -> int:
        """Return a size as it is laid out. Maps have two sizes of inputs, and are not padded."""
        if size not in self._padded_sizes:
            pads = self._pads and self.layers[0].kind != "linear-map"
            self._padded_sizes[size] = aligned(size, self.device) if pads else size
        return self._padded_sizes[size]

    def running(self, states: dict[str, LayerState], key: str, measured: Container[str] = ()) -> tuple[Tensor, Tensor]:
        """Return the running sums of a factor, ``[n * B, ...]``, and their weights, ``[n]``; zeros where there is none.

        ``measured``: layers that get one from now on.
        """
        mine = [states[layer.name].running.get(key) for layer in self.layers]
        held = self._averages.get(key)
        if held is not None and all(
            average.value is view if average is not None else layer.name not in measured
            for layer, average, view in zip(self.layers, mine, held[0], strict=True)
        ):
            return held[1], held[2]
        blocks, *sizes = self.layers[0].spec.factor(key).shape
        values = torch.zeros(self.num_layers * blocks, *sizes, dtype=self.dtype, device=self.device)
        weights = torch.zeros(self.num_layers, dtype=self.dtype, device=self.device)
        views = list(torch.split(values, blocks))
        for i, (layer, average) in enumerate(zip(self.layers, mine, strict=True)):
            if average is not None:
                views[i].copy_(average.value)
                weights[i] = average.weight
            if average is not None or layer.name in measured:
                states[layer.name].running[key] = Average(views[i], weights[i])
        self._averages[key] = (views, values, weights)
        return values, weights

    def moments(self, states: dict[str, LayerState], name: str) -> tuple[Tensor, Tensor]:
        """Return the layers' ``moments`` or ``momentum``, with the buffer's layout, and their weights, ``[n]``."""
        mine = [getattr(states[layer.name], name) for layer in self.layers]
        held = self._moments.get(name)
        if held is not None and all(a is not None and a.value is v for a, v in zip(mine, held[0], strict=True)):
            return held[1], held[2]
        values = torch.zeros(self.num_layers * self.blocks, *self.padded, dtype=self.dtype, device=self.device)
        weights = torch.zeros(self.num_layers, dtype=self.dtype, device=self.device)
        views = [view for _, view in self.split(values)]
        for i, (layer, average) in enumerate(zip(self.layers, mine, strict=True)):
            if average is not None:
                views[i].copy_(average.value)
                weights[i] = average.weight
            setattr(states[layer.name], name, Average(views[i], weights[i]))
        self._moments[name] = (views, values, weights)
        return values, weights

    def adaptive(self, states: dict[str, LayerState]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the layers' state of ``curvature="adaptive"``: logarithms of damping and length, ``[n]``, and moments
        of the rows and of the columns of the buffer, ``[n * B, rows]`` and ``[n * B, columns]``."""
        mine = [states[layer.name].adaptive for layer in self.layers]
        if self._adaptive is not None and all(a is b for a, b in zip(mine, self._adaptive[0], strict=True)):
            return self._adaptive[1]
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        damping, length = torch.zeros(2, self.num_layers, **like)
        sides = [torch.zeros(self.num_layers * self.blocks, size, **like) for size in self.padded]
        views = []
        for i, layer in enumerate(self.layers):
            here = slice(i * self.blocks, (i + 1) * self.blocks)
            down, across = (side[here, :size] for side, size in zip(sides, self.sizes, strict=True))
            outputs, inputs = (across, down) if self.transposed else (down, across)
            views.append(Adaptive(damping[i], length[i], outputs, inputs))
            known = mine[i] or Adaptive.empty(layer.spec.grad_shape, **like)
            for target, value in zip(views[-1].tensors().values(), known.tensors().values(), strict=True):
                target.copy_(value)
            states[layer.name].adaptive = views[-1]
        self._adaptive = views, (damping, length, sides[0], sides[1])
        return self._adaptive[1]

    def decompositions(self, states: dict[str, LayerState]) -> dict[str, Decomposition] | None:
        """Return the layers' decompositions as one layer's; None unless all exist and have the same form."""
        found: dict[str, Decomposition] = {}
        for factor in self.layers[0].spec.factors:
            key = factor.key
            mine = [states[layer.name].decompositions.get(key) for layer in self.layers]
            held = self._decompositions.get(key)
            if held is not None and all(a is b for a, b in zip(mine, held[0], strict=True)):
                found[key] = held[1]
                continue
            present = [d for d in mine if d is not None]
            forms = {(type(d), tuple(d.tensors())) for d in present}
            if len(present) < len(mine) or len(forms) > 1:
                return None
            pads = not factor.whole_dim and (self.blocks == 1 or is_input(key))
            found[key], views = self._join(present, pads=pads)
            for layer, view in zip(self.layers, views, strict=True):
                states[layer.name].decompositions[key] = view
            self._decompositions[key] = (views, found[key])
        return found

    def _join(self, decompositions: list[Decomposition], *, pads: bool) -> tuple[Decomposition, list[Decomposition]]:
        """Return decompositions concatenated along the blocks, and each as a view of the result. ``pads``: to the size
        of the buffer, as a whole factor must be."""
        common: dict[str, Tensor] = {}
        views: list[dict[str, Tensor]] = [{} for _ in decompositions]
        for name, first in decompositions[0].tensors().items():
            sizes = [self._pad(size) if pads else size for size in first.shape[1:]]
            joined = torch.zeros(self.num_layers * len(first), *sizes, dtype=first.dtype, device=first.device)
            bare = joined[(slice(None), *(slice(size) for size in first.shape[1:]))]
            for i, part in enumerate(torch.split(bare, len(first))):
                views[i][name] = part.copy_(decompositions[i].tensors()[name])
            common[name] = joined
        return from_tensors(common), [from_tensors(view) for view in views]

    def read(self, whole: Mapping[int, Tensor] = NOTHING) -> Tensor:
        """Copy the gradients to a buffer, which is reused, and return it: ``[n * B, O, I]`` or ``[n * B, I, O]``,
        padded with zeros. ``whole``: gradients by ``id(parameter)`` where parameters have only shards of them."""
        if self._grads is None:
            self.use(torch.zeros(self.num_layers * self.elements_laid_out, dtype=self.dtype, device=self.device))
        pairs = self.pairs(whole)
        foreach_copy_([part for _, part in pairs], [grad for grad, _ in pairs])
        for layer, parts in zip(self.layers, self._parts, strict=True):
            if layer.bias is not None and layer.bias.grad is None:
                parts[1].zero_()
        return self.buffer

    def use(self, memory: Tensor) -> None:
        """Keep gradients in this memory, which is zero, ``[layers * elements_laid_out]``."""
        self._grads = memory.view(self.num_layers * self.blocks, *self.padded)
        self._parts = [split_grad(layer, part) for layer, part in self.split(self._grads)]

    def parts(self, grads: Tensor | None = None) -> list[tuple[Layer, list[Tensor]]]:
        """Return each layer with its parameters' views of the buffer, or of a tensor shaped like it."""
        if grads is None or grads is self._grads:
            return list(zip(self.layers, self._parts, strict=True))
        return [(layer, split_grad(layer, part)) for layer, part in self.split(grads)]

    @property
    def buffer(self) -> Tensor:
        """The buffer that the gradients were read to."""
        assert self._grads is not None
        return self._grads

    def norms(self, grads: Tensor) -> Tensor:
        """Return the layers' norms, ``[n]``, of a tensor shaped like the buffer."""
        found: Tensor = torch.linalg.vector_norm(grads.view(self.num_layers, -1), dim=1)
        return found

    def pairs(self, whole: Mapping[int, Tensor] = NOTHING) -> list[tuple[Tensor, Tensor]]:
        """Return the gradients that exist, each with its view of the buffer."""
        found = [
            (whole.get(id(p), p.grad), part)
            for layer, parts in zip(self.layers, self._parts, strict=True)
            for p, part in zip(layer.parameters(), parts, strict=True)
        ]
        return [(grad, part) for grad, part in found if grad is not None]

    def split(self, grads: Tensor) -> list[tuple[Layer, Tensor]]:
        """Return each layer with its view ``[B, O, I]`` of a tensor shaped like the buffer, without padding."""
        down, across = self.sizes
        bare = grads[:, :down, :across]
        views = torch.split(bare.mT if self.transposed else bare, self.blocks)
        return list(zip(self.layers, views, strict=True))


def write_back(stacks: list[Stack]) -> None:
    """Copy the stacks' buffers to the gradients."""
    pairs = [pair for stack in stacks for pair in stack.pairs()]
    if pairs:
        foreach_copy_([grad for grad, _ in pairs], [part for _, part in pairs])
