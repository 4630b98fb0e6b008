"""Which parts of the stacks' buffers belong to which parameters and gradients, as tables for kernels (``ops/many.py``).

Input: stacks, whose buffers may lie in common memory, and parameters. Output: tables; None if Triton is not available
or a memory layout is not supported. Owns: nothing.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from dkfac.factors.stacks import Stack
from dkfac.layers.layer import Layer
from dkfac.ops import many

ALIGNMENT = 128
"""Elements, of buffers in common memory."""


def lay_out(stacks: list[Stack], weights: list[Tensor], rest: int, old: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """Move the stacks' buffers to common memory, the old one if it fits, if kernels can read it; return the memory, and
    a last buffer of ``rest`` elements."""
    device, dtype = stacks[0].device, stacks[0].dtype
    if not many.are_usable(*weights, torch.zeros(0, device=device, dtype=dtype)):
        return None, torch.zeros(rest, device=device, dtype=dtype)
    sizes = [stack.num_layers * stack.elements_laid_out for stack in stacks] + [rest]
    *begins, end = itertools.accumulate((size + -size % ALIGNMENT for size in sizes), initial=0)
    fits = old is not None and len(old) == end and old.device == device
    memory = old.zero_() if old is not None and fits else torch.zeros(end, device=device, dtype=dtype)
    *parts, last = (memory[begin : begin + size] for begin, size in zip(begins, sizes, strict=True))
    for stack, part in zip(stacks, parts, strict=True):
        stack.use(part)
    return memory, last


def pairs_of(stack: Stack, grads: Tensor) -> list[tuple[int, Layer, Tensor, Tensor]]:
    """Return the parameters that have gradients, with their views of a tensor shaped like the stack's buffer."""
    return [
        (i, layer, p, part)
        for i, (layer, parts) in enumerate(stack.parts(grads))
        for p, part in zip(layer.parameters(), parts, strict=True)
        if p.grad is not None
    ]


def describe_together(stacks: list[Stack], parameters: list[Tensor]) -> many.Items | None:
    """Return the mapping between parameters and the memory of all buffers. Layers are counted over all stacks."""
    inner, index, first = list[Tensor](), list[int](), 0
    for stack in stacks:
        for i, _, _, part in pairs_of(stack, stack.buffer):
            inner.append(part)
            index.append(first + i)
        first += stack.num_layers
    return many.describe(parameters, inner, range(len(inner)), index)


def describe_parameters(stacks: list[Stack], parameters: list[Tensor]) -> list[many.Items] | None:
    if not many.are_usable(*(stack.buffer for stack in stacks), *parameters):
        return None
    found, begin = list[many.Items | None](), 0
    for stack in stacks:
        pairs = pairs_of(stack, stack.buffer)
        slots = range(begin, begin + len(pairs))
        begin += len(pairs)
        inner, outer = [part for *_, part in pairs], [p for *_, p, _ in pairs]
        found.append(many.describe(outer, inner, slots, [i for i, *_ in pairs], int(stack.buffer.storage_offset())))
    return None if any(items is None for items in found) else [items for items in found if items is not None]


def describe_gradients(stacks: list[Stack], used: list[Tensor], views: list[Tensor]) -> list[many.Items] | None:
    """Return which gradients belong to which parts of the memory of all buffers, of each stack's buffer and, last, of
    the other parameters' buffer.

    ``used`` are the parameters, in this order. None if Triton is not available or a memory layout is not supported.
    """
    slots, found = {id(p): i for i, p in enumerate(used)}, list[many.Items | None]()
    rest, every = dict(slots), list[Tensor]()
    if not many.are_usable(*(stack.buffer for stack in stacks), *(p.grad for p in used if p.grad is not None)):
        return None
    for stack in stacks:
        grads, inner, places, index = list[Tensor](), list[Tensor](), list[int](), list[int]()
        for i, (layer, parts) in enumerate(stack.parts()):
            for p, part in zip(layer.parameters(), parts, strict=True):
                if p.grad is not None:
                    grads.append(p.grad)
                    inner.append(part)
                    places.append(rest.pop(id(p)))
                    index.append(i)
        found.append(many.describe(grads, inner, places, index, int(stack.buffer.storage_offset())))
        every += inner
    others = [p.grad for p in used if id(p) in rest and p.grad is not None]
    begin = int(views[0].storage_offset()) if views else 0
    found.append(many.describe(others, views, list(rest.values()), [0] * len(others), begin))
    grads = [p.grad for p in used if p.grad is not None]
    found.insert(0, many.describe(grads, [*every, *views], range(len(grads)), [0] * len(grads)))
    return None if any(items is None for items in found) else [items for items in found if items is not None]
