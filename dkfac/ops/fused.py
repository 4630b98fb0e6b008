"""Element-wise work on stacks of tensors in one pass over memory: Triton kernels, and the same in plain torch.

Shapes: n = tensors in a stack, B = blocks, O = out features, I = in features. What differs from tensor to tensor
(``scale``, ``good``, ``sane``, ``damping``) is a vector ``[n]`` that stays on the device: the host never reads it.
Both ways round after every operation, so they give the same bits. The first call on a device compiles kernels: make
it before a CUDA graph is captured.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

tl: Any = None
"""``triton.language``, set by ``_kernels``: kernels look it up among the globals of their module."""

BLOCK = 1024
TILE = 2048
ROUNDING = {"enable_fp_fusion": False}
"""As torch rounds. Triton 3.9 warns where the choice is left to it, and 3.10 will choose otherwise."""


def absorb_(value: Tensor, total: Tensor, decay: float, scale: Tensor, good: Tensor) -> None:
    """Set ``value[i]`` to ``decay value[i] + scale[i] total[i]`` where ``good[i]``; leave it alone elsewhere.

    ``total[i]`` may hold anything where not ``good[i]``, and holds anything afterwards.
    """
    assert value.shape == total.shape
    assert scale.shape == good.shape == value.shape[:1]
    if _use_triton(value, total, scale, good):
        _launch_flat(_absorb_kernel, value, total, scale, good, decay)
    else:  # in place: new memory costs a CPU more than a pass over old
        total.mul_(_over(scale, total)).masked_fill_(~_over(good, total), -0.0)  # which changes no number, not even -0
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
    _launch(_divide_kernel, n * blocks * down * across, *arguments, HEIGHT=height, WIDTH=width)
    return rotated


def finish_(raw: Tensor, update: Tensor, scale: Tensor, sane: Tensor, good: Tensor) -> None:
    """Set ``raw[i]`` to ``scale[i] update[i]`` where ``sane[i]``; set all to zero if not ``good``, which is one flag.

    ``update[i]`` and ``scale[i]`` may hold anything where not ``sane[i]``, ``raw`` too where not ``good``.
    """
    assert update.shape == raw.shape
    assert scale.shape == sane.shape == raw.shape[:1]
    if _use_triton(raw, update, scale, sane, good):
        _launch_flat(_finish_kernel, raw, update, scale, sane, good)
    else:
        chosen = torch.where(_over(sane, raw), update * _over(scale, raw), raw)
        raw.copy_(chosen.masked_fill_(~good, 0))


def write_(
    grad: Tensor, bias: Tensor | None, raw: Tensor, update: Tensor, scale: Tensor, sane: Tensor, good: Tensor
) -> None:
    """Set one layer's gradients to what ``finish_`` would make of ``raw``: ``grad``, ``[R, C]``, to its upper left.

    ``bias`` is what follows there: the next column, ``[R]``, or the next row if it is ``[1, C]``. ``scale`` and
    ``sane`` have one element.
    """
    (rows, columns), across = grad.shape, raw.shape[1]
    side = 0 if bias is None else bias.ndim
    assert update.shape == raw.shape
    assert raw.shape[0] >= rows + (side == 2)
    assert across >= columns + (side == 1)
    given = [t for t in (grad, bias, raw, update, scale, sane, good) if t is not None]
    if not _use_triton(*given):
        chosen = torch.where(sane, update * scale, raw).masked_fill_(~good, 0)
        grad.copy_(chosen[:rows, :columns])
        if bias is not None:
            bias.copy_(chosen[:rows, columns] if side == 1 else chosen[rows : rows + 1, :columns])
        return
    width = min(max(16, 1 << (columns - 1).bit_length()), 256)
    height = TILE // width
    down, aside = -(-(rows + (side == 2)) // height), -(-(columns + (side == 1)) // width)
    arguments = (bias if bias is not None else grad, raw, update, scale, sane, good, rows, columns, across, aside)
    _launch(_write_kernel, down * aside, grad, *arguments, SIDE=side, HEIGHT=height, WIDTH=width)


def _over(vector: Tensor, stack: Tensor) -> Tensor:
    """Return ``[n]`` shaped to broadcast over a stack ``[n, ...]``."""
    return vector.view(-1, *(1,) * (stack.ndim - 1))


def _use_triton(*tensors: Tensor) -> bool:
    """Whether the kernels take these tensors: contiguous, float32 (or flags), on one GPU that Triton can run on.

    Under TRITON_INTERPRET=1, on the CPU too.
    """
    device = tensors[0].device
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False  # before Triton is imported in vain
    if not all(t.device == device and t.dtype in (torch.float32, torch.bool) and t.is_contiguous() for t in tensors):
        return False
    return _kernels() is not None and _works(device)


@functools.cache
def _kernels() -> dict[Callable[..., None], Any] | None:
    """Return the compiled form of each kernel, None without Triton."""
    global tl
    try:
        triton = importlib.import_module("triton")
        tl = importlib.import_module("triton.language")
    except ImportError:
        return None
    return {kernel: triton.jit(kernel) for kernel in (_absorb_kernel, _divide_kernel, _finish_kernel, _write_kernel)}


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether a kernel runs there. Triton that imports may still lack a C compiler, Python's headers or this GPU."""
    kernels = _kernels()
    assert kernels is not None
    if device.type != "cuda":  # the variable counts when Triton makes a kernel, not when we are called
        return type(kernels[_absorb_kernel]).__name__ == "InterpretedFunction"
    one = torch.ones(1, device=device)
    try:
        _launch_flat(_absorb_kernel, one, one, one, one > 0, 0.5)
    except Exception as error:
        warnings.warn(
            f"Triton cannot run kernels on {device}, so dkfac uses slower torch operations there. "
            f"It said: {type(error).__name__}: {error}",
            stacklevel=4,
        )
        return False
    return True


def _launch_flat(kernel: Callable[..., None], stack: Tensor, *arguments: Any) -> None:
    """Run a kernel whose programs each do ``BLOCK`` elements of one tensor of the stack."""
    size = stack.numel() // max(len(stack), 1)
    pieces = -(-size // BLOCK)
    _launch(kernel, len(stack) * pieces, stack, *arguments, size, pieces, BLOCK=BLOCK)


def _launch(kernel: Callable[..., None], programs: int, first: Tensor, *arguments: Any, **constants: int) -> None:
    kernels = _kernels()
    assert kernels is not None
    if programs == 0:
        return
    with torch.cuda.device(first.get_device()):  # Triton launches on the current one, wherever the tensors are
        kernels[kernel][(programs,)](first, *arguments, **constants, **ROUNDING)


# The kernels. Offsets are 64-bit: a stack may have more than 2**31 elements. Only constants are annotated: Triton looks
# the names in annotations up, and allows only its own.


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


def _write_kernel(  # type: ignore[no-untyped-def]
    grad, bias, raw, update, scale, sane, good, rows, columns, across, aside,
    SIDE: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // aside).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    column = (tl.program_id(0) % aside).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inner = (row < rows)[:, None] & (column < columns)[None, :]
    outer = inner
    if SIDE == 1:
        outer = (row < rows)[:, None] & (column <= columns)[None, :]
    if SIDE == 2:
        outer = (row <= rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * across + column[None, :]
    found = tl.zeros((HEIGHT, WIDTH), tl.float32)
    if tl.load(good):
        if tl.load(sane):
            found = tl.load(update + place, mask=outer, other=0.0) * tl.load(scale)
        else:
            found = tl.load(raw + place, mask=outer, other=0.0)
    tl.store(grad + row[:, None] * columns + column[None, :], found, mask=inner)
    if SIDE == 1:
        tl.store(bias + row[:, None] + column[None, :] - columns, found, mask=outer & (column == columns)[None, :])
    if SIDE == 2:
        tl.store(bias + column[None, :] + row[:, None] - rows, found, mask=outer & (row == rows)[:, None])
