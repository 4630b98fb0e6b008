"""The element-wise part of ``curvature="adaptive"``, in two passes over memory: Triton kernels with a torch fallback.

Input: gradients, momentum and second moments of n layers of one shape, in the eigenbasis. Output: sums per layer, and
the moments and updates, in place. Owns: nothing.

Tensors are laid out like a stack's buffer, whose n equal parts are the layers; values per layer are vectors ``[n]`` on
the device, which the host never reads. Padding is zero and contributes nothing. Sums of the kernels are added up in a
fixed order. The first call on a device compiles: make it before capturing a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dkfac.ops import kernels

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""

ELEMENTS = 1024
MOST_PER_LAYER = 1024
"""Limit on the programs of a layer; beyond it, each processes several blocks of ``ELEMENTS``."""
NUM_SUMS = 8


def sums_of_last_update(gradient: Tensor, momentum: Tensor, square: Tensor, mean: Tensor, added: Tensor) -> Tensor:
    """Return sums over the elements of each layer, ``[n, 8]``, from which the last update is judged.

    With ``u = momentum / sqrt(square + added)``, ``y = (square - mean) / (square + added)``, g the gradient and v its
    ``square``: the sums of ``u^2, y u^2, v u^2, v y u^2, v y^2 u^2, g u, g y u, g^2``.
    """
    n = len(added)
    if uses_kernels(gradient, momentum, square, mean, added):
        size, programs = _split(square, n)
        partial = torch.empty(n, programs, NUM_SUMS, dtype=square.dtype, device=square.device)
        arguments = (gradient, momentum, square, mean, added, partial, size, programs)
        kernels.launch_kernel(_judge_kernel, n * programs, *arguments, BLOCK=ELEMENTS)
        return partial.sum(1)
    root = (square + _over(added, square)).rsqrt_()
    update = momentum * root
    change = (square - _over(mean, square)).mul_(root).mul_(root)
    changed, noise = change * update, square * update
    found = [_dot(update, update, n), _dot(changed, update, n), _dot(noise, update, n), _dot(noise, changed, n)]
    found += [_dot(change.mul_(noise), changed, n)]
    found += [_dot(gradient, other, n) for other in (update, changed, gradient)]
    return torch.stack(found, 1)


def update_(
    gradient: Tensor, momentum: Tensor, square: Tensor, keep: Tensor, keep_square: Tensor, added: Tensor, bound: Tensor,
    *, nesterov: bool,
) -> Tensor:  # fmt: skip
    """Update ``momentum`` to ``keep momentum + gradient`` and ``square`` likewise with the squared gradient, and
    overwrite ``gradient`` by ``m / sqrt(square + added)``, clamped to ``bound``.

    m is the momentum, or with ``nesterov`` ``keep momentum + gradient``. Returns the sums of the squared updates and of
    ``m^2`` over each layer, ``[n, 2]``. ``keep`` and ``keep_square`` are single values on the device.
    """
    n = len(added)
    if uses_kernels(gradient, momentum, square, keep, keep_square, added, bound):
        size, programs = _split(square, n)
        partial = torch.empty(n, programs, 2, dtype=square.dtype, device=square.device)
        arguments = (gradient, momentum, square, keep, keep_square, added, bound, partial, size, programs)
        kernels.launch_kernel(_update_kernel, n * programs, *arguments, NESTEROV=nesterov, BLOCK=ELEMENTS)
        return partial.sum(1)
    used = momentum.mul_(keep).add_(gradient)
    square.mul_(keep_square).addcmul_(gradient, gradient)
    if nesterov:
        used = torch.addcmul(gradient, momentum, keep)
    torch.add(square, _over(added, square), out=gradient).rsqrt_().mul_(used)
    clamp_(gradient, _over(bound, gradient))
    return torch.stack([_dot(gradient, gradient, n), _dot(used, used, n)], 1)


def clamp_(values: Tensor, most: Tensor) -> Tensor:
    """Clamp values to ``[-most, most]`` in place. On a CPU, ``clamp_`` is several times slower with bounds that are
    broadcast."""
    return torch.maximum(torch.minimum(values, most, out=values), -most, out=values)


def _dot(x: Tensor, y: Tensor, n: int) -> Tensor:
    """Return the dot products of each layer's parts, ``[n]``."""
    if n == 1:
        return torch.dot(x.reshape(-1), y.reshape(-1)).unsqueeze(0)  # needs no memory
    return (x * y).view(n, -1).sum(1)


def _over(values: Tensor, like: Tensor) -> Tensor:
    """Return values per layer, ``[n]``, to be broadcast over a stack's buffer, ``[n * B, ...]``."""
    blocks = len(like) // len(values)
    each = values if blocks == 1 else values.repeat_interleave(blocks)
    return each.view(-1, *[1] * (like.ndim - 1))


def uses_kernels(*tensors: Tensor) -> bool:
    return kernels.usable((torch.float32,), *tensors) and all(t.is_contiguous() for t in tensors)


def _split(stack: Tensor, n: int) -> tuple[int, int]:
    """Return the number of elements of a layer, and of programs that process them."""
    size = stack.numel() // n
    return size, max(1, min(MOST_PER_LAYER, -(-size // ELEMENTS)))


# Kernels. Offsets are 64-bit: a stack may have more than 2**31 elements.


def _judge_kernel(  # type: ignore[no-untyped-def]
    gradient, momentum, square, mean, added, partial, size, programs, BLOCK: tl.constexpr
):
    layer = tl.program_id(0) // programs
    level = tl.load(mean + layer)
    shift = tl.load(added + layer)
    uu = tl.zeros((BLOCK,), tl.float32)
    yuu = tl.zeros((BLOCK,), tl.float32)
    vuu = tl.zeros((BLOCK,), tl.float32)
    vyuu = tl.zeros((BLOCK,), tl.float32)
    vyyuu = tl.zeros((BLOCK,), tl.float32)
    gu = tl.zeros((BLOCK,), tl.float32)
    gyu = tl.zeros((BLOCK,), tl.float32)
    gg = tl.zeros((BLOCK,), tl.float32)
    for begin in range((tl.program_id(0) % programs) * BLOCK, size, programs * BLOCK):
        within = begin + tl.arange(0, BLOCK)
        place = layer.to(tl.int64) * size + within
        g = tl.load(gradient + place, mask=within < size, other=0.0)
        m = tl.load(momentum + place, mask=within < size, other=0.0)
        v = tl.load(square + place, mask=within < size, other=0.0)
        root = tl.rsqrt(v + shift)
        u = m * root
        y = (v - level) * root * root
        yu = y * u
        vu = v * u
        uu += u * u
        yuu += yu * u
        vuu += vu * u
        vyuu += vu * yu
        vyyuu += vu * y * yu
        gu += g * u
        gyu += g * yu
        gg += g * g
    partial += tl.program_id(0) * 8
    tl.store(partial, tl.sum(uu))
    tl.store(partial + 1, tl.sum(yuu))
    tl.store(partial + 2, tl.sum(vuu))
    tl.store(partial + 3, tl.sum(vyuu))
    tl.store(partial + 4, tl.sum(vyyuu))
    tl.store(partial + 5, tl.sum(gu))
    tl.store(partial + 6, tl.sum(gyu))
    tl.store(partial + 7, tl.sum(gg))


def _update_kernel(  # type: ignore[no-untyped-def]
    gradient, momentum, square, keep, keep_square, added, bound, partial, size, programs,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0) // programs
    shift = tl.load(added + layer)
    most = tl.load(bound + layer)
    decay = tl.load(keep)
    decay_square = tl.load(keep_square)
    uu = tl.zeros((BLOCK,), tl.float32)
    mm = tl.zeros((BLOCK,), tl.float32)
    for begin in range((tl.program_id(0) % programs) * BLOCK, size, programs * BLOCK):
        within = begin + tl.arange(0, BLOCK)
        place = layer.to(tl.int64) * size + within
        g = tl.load(gradient + place, mask=within < size, other=0.0)
        m = tl.load(momentum + place, mask=within < size, other=0.0) * decay + g
        v = tl.load(square + place, mask=within < size, other=0.0) * decay_square + g * g
        tl.store(momentum + place, m, mask=within < size)
        tl.store(square + place, v, mask=within < size)
        if NESTEROV:
            m = g + m * decay
        u = tl.rsqrt(v + shift) * m
        u = tl.where(u > most, most, tl.where(u < -most, -most, u))  # keeps NaN
        tl.store(gradient + place, u, mask=within < size)
        uu += tl.where(within < size, u * u, 0.0)
        mm += m * m
    partial += tl.program_id(0) * 2
    tl.store(partial, tl.sum(uu))
    tl.store(partial + 1, tl.sum(mm))
