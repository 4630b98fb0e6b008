"""Sum the outer products of the rows of many tensors in a few launches: Triton only, check ``can_read`` first.

Input: tensors at any addresses, and which of their features belong to which factor. Output: one flat tensor with all
sums. Owns: tables of what is computed where, which are the same as long as shapes and strides are.

A *row* is a position of a tensor ``[N, positions, channels]``, or the patch that a convolution reads there, which is
never materialized. A factor is computed in square tiles, whose rows are split among programs if there are few tiles:
each program writes the partial sum of a tile, and a second kernel adds them up in a fixed order, scales them and writes
both triangles. So results do not depend on timing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dkfac.ops import gram_kernels, kernels
from dkfac.ops.many import on_its_way

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRODUCT_FIELDS = 32
SMALL_TILE, LARGE_TILE, SMALL_FACTOR = 64, 128, 192
"""Widths of tiles, and the largest factor that is computed in small ones."""
ROWS_AT_ONCE = {SMALL_TILE: 64, LARGE_TILE: 64}
WARPS_BY_TILE = {SMALL_TILE: 4, LARGE_TILE: 8}
PROGRAMS = 1056
"""Number of programs among which the rows are split: eight for each multiprocessor of a large GPU."""
FEWEST_ITERATIONS = 8
"""Number of iterations of a program below which rows are not split further."""


@dataclass(frozen=True, slots=True)
class ConvWindow:
    """The two-dimensional window of a convolution."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    outputs: tuple[int, int]
    every: tuple[int, int] = (1, 1)
    """Only one in so many rows and columns of outputs is used, others at each ``turn``."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How the rows of a tensor are found in memory."""

    images: int
    positions: int
    strides: tuple[int, int, int]
    """Strides of images, positions (0 for a convolution) and channels."""
    window: ConvWindow | None = None
    sizes: tuple[int, int] = (1, 1)
    """Height and width of the images of a convolution."""
    pixel_strides: tuple[int, int] = (0, 0)

    @property
    def taps(self) -> int:
        return 1 if self.window is None else self.window.kernel[0] * self.window.kernel[1]


@dataclass(frozen=True, slots=True)
class Product:
    """The sum of the outer products of some features of a tensor's rows: one factor, or some of its blocks."""

    tensor: int
    """Index of the tensor."""
    scale: int
    """Index of the number that multiplies the sum."""
    reading: Reading
    dtype: torch.dtype
    blocks: int
    channels: int
    """Number of channels in a block."""
    ones: bool
    """Whether a constant feature 1 follows."""
    begins: tuple[int, ...]
    """Places in the result that the blocks are written to."""
    first: int = 0
    """First channel that is used."""
    pieces: int = 1
    group_channels: int = 0
    """Number of adjacent blocks, and of channels after which the next ones begin; 0: there is one group."""
    aligned: bool = False
    """Whether :func:`is_aligned` holds."""

    @property
    def dim(self) -> int:
        return self.channels * self.reading.taps + self.ones


def read_rows(rows: Tensor) -> Reading | None:
    """Return how to read rows ``[..., features]``; None if they have too many strides."""
    sizes, strides = list(rows.shape[:-1]), list(rows.stride()[:-1])
    for i in range(len(sizes) - 2, -1, -1):
        if sizes[i + 1] == 1 or sizes[i] == 1 or strides[i] == strides[i + 1] * sizes[i + 1]:
            strides[i] = strides[i] if sizes[i + 1] == 1 else strides[i + 1]
            sizes[i : i + 2], strides[i : i + 2] = [sizes[i] * sizes[i + 1]], [strides[i]]
    if len(sizes) > 2:
        return None
    (images, positions), (apart, along) = [1, 1, *sizes][-2:], [0, 0, *strides][-2:]
    return Reading(images, positions, (apart, along, rows.stride(-1)))


def read_images(x: Tensor, window: ConvWindow | None = None) -> Reading | None:
    """Return how to read the pixels of images ``[N, C, H, W]``, or their patches."""
    if window is None:
        return read_rows(x.movedim(1, -1))
    images, _, height, width = x.shape
    apart, across, *along = x.stride()
    positions = math.prod(n // every for n, every in zip(window.outputs, window.every, strict=True))
    return Reading(images, positions, (apart, 0, across), window, (height, width), (along[0], along[1]))


def can_read(*tensors: Tensor) -> bool:
    return kernels.usable(DTYPES, *tensors)


def is_aligned(t: Tensor, reading: Reading, *channels: int) -> bool:
    """Return whether blocks of a tensor's channels can be read 16 bytes at a time.

    ``channels``: where blocks may begin, and their widths.
    """
    unit = 16 // t.element_size()
    numbers = (*channels, *reading.strides[:2], *reading.pixel_strides)
    return reading.strides[2] == 1 and not any(number % unit for number in numbers) and t.data_ptr() % 16 == 0


@dataclass(eq=False, slots=True)
class Launch:
    """Tables for the products that one compiled kernel computes."""

    dtype: torch.dtype
    constants: dict[str, int]
    programs: list[tuple[int, ...]] = field(default_factory=list)
    """Product, block, row and column of the tile, first iteration and the one after the last."""
    table: Tensor = field(default_factory=lambda: torch.empty(0))


class Grams:
    """A plan for products of tensors of given shapes and strides."""

    def __init__(self, products: Sequence[Product], size: int, device: torch.device, *, tf32: bool) -> None:
        """``size``: number of elements of the result."""
        self._size, self._device, self._tf32 = size, device, tf32
        self._products = _table([_fields(product) for product in products], device)
        self._launches: list[Launch] = []
        self._finish: dict[int, Tensor] = {}
        """By width of a tile: product, block, row, column, first partial sum, number of partial sums, place."""
        for width in (SMALL_TILE, LARGE_TILE):
            self._prepare(products, width)

    def _prepare(self, products: Sequence[Product], width: int) -> None:
        chosen = [i for i, product in enumerate(products) if _tile(product) == width]
        each = {i: _iterations(products[i], width) for i in chosen}
        total = sum(each[i] * len(_tiles(products[i], width)) for i in chosen)
        most = max(FEWEST_ITERATIONS, -(-total // PROGRAMS))
        launches: dict[Any, Launch] = {}
        for i in chosen:
            kind = _constants(products[i], tf32=self._tf32)
            launch = launches.setdefault((products[i].dtype, *kind.items()), Launch(products[i].dtype, kind))
            for block, row, column in _tiles(products[i], width):
                for begin in range(0, each[i], most):
                    launch.programs.append((i, block, row, column, begin, min(begin + most, each[i])))
        number, found = 0, dict[tuple[int, ...], list[int]]()
        for launch in launches.values():
            for program in launch.programs:
                found.setdefault(program[:4], [number, 0])[1] += 1
                number += 1
            launch.table = _table(launch.programs, self._device)
        finish = [
            (*tile, *parts, begin) for tile, parts in found.items() for begin in products[tile[0]].begins
        ]  # fmt: skip
        self._launches += launches.values()
        if finish:
            self._finish[width] = _table(finish, self._device)

    def run(self, tensors: Sequence[Tensor], scales: Sequence[float], turn: int = 0) -> Tensor:
        """Return the result for tensors of the planned shapes and strides."""
        gram_kernels.compile_helpers()
        device = self._device
        addresses = [turn, *[t.data_ptr() for t in tensors]]
        pointers = on_its_way(addresses, device).to(device, non_blocking=True)
        factors = on_its_way(scales, device, torch.float32).to(device, non_blocking=True)
        result = torch.empty(self._size, device=device)
        for width, finish in self._finish.items():
            launches = [launch for launch in self._launches if launch.constants["TILE"] == width]
            counts = [len(launch.table) for launch in launches]
            partial = torch.empty(sum(counts), width, width, device=device)
            for launch, part in zip(launches, torch.split(partial, counts), strict=True):
                like = next(t for t in tensors if t.dtype is launch.dtype)
                kernels.launch_kernel(
                    gram_kernels.partial_kernel, len(launch.table), like, pointers, self._products, launch.table, part,
                    **launch.constants,
                )  # fmt: skip
            given = (partial, self._products, finish, factors, result)
            options: dict[str, Any] = {"TILE": width, "FIELDS": PRODUCT_FIELDS, "num_warps": 8}
            kernels.launch_kernel(gram_kernels.finish_kernel, len(finish), *given, **options)
        return result


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    flat = on_its_way([number for row in rows for number in row], device).to(device, non_blocking=True)
    return flat.view(len(rows), -1)


def _packs(product: Product) -> bool:
    """Return whether several blocks are computed in one tile, of which only the blocks on the diagonal are used."""
    is_narrow = product.blocks > 1 and SMALL_TILE % product.dim == 0 and product.reading.window is None
    is_adjacent = product.pieces == product.blocks or product.group_channels == product.channels
    return is_narrow and is_adjacent and product.first == 0 and not product.ones


def _tile(product: Product) -> int:
    return SMALL_TILE if product.dim <= SMALL_FACTOR else LARGE_TILE


def _iterations(product: Product, width: int) -> int:
    return product.reading.images * -(-product.reading.positions // ROWS_AT_ONCE[width])


def _tiles(product: Product, width: int) -> list[tuple[int, int, int]]:
    """Return block, row and column of the tiles of the lower triangle."""
    if _packs(product):
        return [(0, i, i) for i in range(-(-product.blocks * product.channels // width))]
    number = -(-product.dim // width)
    return [(b, i, j) for b in range(product.blocks) for i in range(number) for j in range(i + 1)]


def _constants(product: Product, *, tf32: bool) -> dict[str, int]:
    """Return what the kernel is compiled for."""
    reading, width = product.reading, _tile(product)
    along = reading.strides[1] if reading.window is None else reading.pixel_strides[1]
    return {
        "IS_CONV": int(reading.window is not None), "INNER": 0 if reading.strides[2] == 1 else 1 if along == 1 else 2,
        "CHANNELS": _channels(product),
        "ALIGNED": int(product.aligned), "ONES": int(product.ones), "SINGLE": int(len(_tiles(product, width)) == 1),
        "ROUNDS": int(tf32 or product.dtype is not torch.float32), "TILE": width, "ROWS": ROWS_AT_ONCE[width],
        "FIELDS": PRODUCT_FIELDS, "num_warps": WARPS_BY_TILE[width],
    }  # fmt: skip


def _channels(product: Product) -> int:
    """Return the number of channels if it helps the compiler to know it: patches are read 16 bytes at a time. -1: there
    is a single tap, so that features are channels; 0: it does not help."""
    if not product.aligned or product.reading.window is None:
        return 0
    return -1 if product.reading.taps == 1 else product.channels


def _fields(product: Product) -> list[int]:
    reading, packs = product.reading, _packs(product)
    window = reading.window or ConvWindow((1, 1), (1, 1), (0, 0), (1, 1), (1, 1))
    channels = product.channels * (product.blocks if packs else 1)
    found = [
        1 + product.tensor, channels, product.dim, product.first, 1 if packs else product.pieces,
        product.group_channels, product.scale, channels if packs else 0,
        *reading.strides, reading.positions, window.outputs[1] // window.every[1], *window.stride, *window.padding,
        *window.dilation, *reading.sizes, *reading.pixel_strides, window.kernel[1], reading.taps, *window.every,
    ]  # fmt: skip
    return found + [0] * (PRODUCT_FIELDS - len(found))
