"""Element-wise operations on stacks of tensors in one pass over memory: Triton kernels with a torch fallback.

Input: stacks, and values per tensor. Output: the stacks, modified in place. Owns: nothing.

Shapes: n = tensors in a stack, B = blocks, O = out features, I = in features. Values per tensor (``scale``, ``good``,
``sane``, ``damping``) are vectors ``[n]`` on the device, which the host never reads. Both implementations round after
every operation, so they are bitwise equal. The first call on a device compiles: make it before capturing a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dkfac.ops import kernels

tl: Any = None
"""``triton.language``, set when a kernel is compiled."""

BLOCK = 1024
TILE = 2048


def absorb_(value: Tensor, total: Tensor, decay: float, scale: Tensor, good: Tensor) -> None:
    """Set ``value[i]`` to ``decay value[i] + scale[i] total[i]`` where ``good[i]``; leave it unchanged elsewhere.

    ``total[i]`` may be arbitrary where not ``good[i]``, and is undefined afterwards.
    """
    assert value.shape == total.shape
    assert scale.shape == good.shape == value.shape[:1]
    if _use_triton(value, total, scale, good):
        _launch_flat(_absorb_kernel, value, total, scale, good, decay)
    else:  # in place: on a CPU, new memory costs more than another pass
        total.mul_(_over(scale, total)).masked_fill_(~_over(good, total), -0.0)  # -0.0 changes no number, not even -0.0
        kept = torch.full_like(scale, decay, dtype=value.dtype).masked_fill_(~good, 1)
        value.mul_(_over(kept, value)).add_(total)


def divide_(rotated: Tensor, g_values: Tensor, a_values: Tensor, damping: Tensor) -> Tensor:
    """Divide ``rotated``, ``[n, B, O, I]``, by ``g (x) a + damping`` in place, and return it.

    The eigenvalues are ``[n, B, O]`` and ``[n, B, I]``.
    """
    n, blocks, rows, columns = rotated.shape
    shapes = (g_values.shape, a_values.shape, damping.shape)
    assert shapes == ((n, blocks, rows), (n, blocks, columns), (n,))
    if not _use_triton(rotated, g_values, a_values, damping):
        return rotated.div_(g_values.unsqueeze(-1) * a_values.unsqueeze(-2) + _over(damping, rotated))
    width = min(max(16, 1 << (columns - 1).bit_length()), 256)
    height = TILE // width
    down, across = -(-rows // height), -(-columns // width)
    arguments = (rotated, g_values, a_values, damping, blocks, rows, columns, down, across)
    kernels.launch_kernel(_divide_kernel, n * blocks * down * across, *arguments, HEIGHT=height, WIDTH=width)
    return rotated


def finish_(raw: Tensor, update: Tensor, scale: Tensor, sane: Tensor, good: Tensor) -> None:
    """Set ``raw[i]`` to ``scale[i] update[i]`` where ``sane[i]``; set all to zero if not ``good``, a single flag.

    ``update[i]`` and ``scale[i]`` may be arbitrary where not ``sane[i]``, and ``raw`` where not ``good``.
    """
    assert update.shape == raw.shape
    assert scale.shape == sane.shape == raw.shape[:1]
    if _use_triton(raw, update, scale, sane, good):
        _launch_flat(_finish_kernel, raw, update, scale, sane, good)
    else:
        chosen = torch.where(_over(sane, raw), update * _over(scale, raw), raw)
        raw.copy_(chosen.masked_fill_(~good, 0))


def _over(vector: Tensor, stack: Tensor) -> Tensor:
    """Return ``[n]`` shaped to broadcast over a stack ``[n, ...]``."""
    return vector.view(-1, *(1,) * (stack.ndim - 1))


def _use_triton(*tensors: Tensor) -> bool:
    """Return whether the kernels support these tensors: contiguous, and float32 or bool."""
    return kernels.usable((torch.float32, torch.bool), *tensors) and all(t.is_contiguous() for t in tensors)


def _launch_flat(kernel: Callable[..., None], stack: Tensor, *arguments: Any) -> None:
    """Launch a kernel in which each program processes ``BLOCK`` elements of one tensor of the stack."""
    size = stack.numel() // max(len(stack), 1)
    pieces = -(-size // BLOCK)
    kernels.launch_kernel(kernel, len(stack) * pieces, stack, *arguments, size, pieces, BLOCK=BLOCK)


# Kernels. Offsets are 64-bit: a stack may have more than 2**31 elements.


def _absorb_kernel(value, total, scale, good, decay, size, pieces, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    item = tl.program_id(0) // pieces
    within = (tl.program_id(0) % pieces).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = item.to(tl.int64) * size + within
    if tl.load(good + item):
        old = tl.load(value + place, mask=within < size, other=0.0)
        new = tl.load(total + place, mask=within < size, other=0.0)
        tl.store(value + place, decay * old + tl.load(scale + item) * new, mask=within < size)


def _divide_kernel(  # type: ignore[no-untyped-def]
    rotated, g_values, a_values, damping, blocks, rows, columns, down, across,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    row = (tile // across).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = (tile % across).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    shift = tl.load(damping + block // blocks)
    block = block.to(tl.int64)
    g = tl.load(g_values + block * rows + row, mask=row < rows, other=1.0)
    a = tl.load(a_values + block * columns + column, mask=column < columns, other=1.0)
    place = (block * rows + row)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    numerator = tl.load(rotated + place, mask=inside, other=0.0)
    tl.store(rotated + place, tl.div_rn(numerator, g[:, None] * a[None, :] + shift), mask=inside)


def _finish_kernel(raw, update, scale, sane, good, size, pieces, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    item = tl.program_id(0) // pieces
    within = (tl.program_id(0) % pieces).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = item.to(tl.int64) * size + within
    if tl.load(good):
        if tl.load(sane + item):
            found = tl.load(update + place, mask=within < size, other=0.0)
            tl.store(raw + place, found * tl.load(scale + item), mask=within < size)
    else:
        tl.store(raw + place, tl.zeros((BLOCK,), tl.float32), mask=within < size)
