"""``curvature="adaptive"`` for all layers in a few launches, whatever their number and shapes: Triton only.

Input: gradients in the stacks' buffers and eigenbases. Output: updates in the same buffers, the factors that give them
their length, and updated moments. Owns: tables with the addresses of everything a step reads and writes.

The same as ``adaptive.py``, which is the reference. A step can be captured in a graph, and the tables must be built
again when a tensor is replaced. Gradients are multiplied, judged and replaced by updates where they are. Adam's length
needs the momentum in the basis of the weights, so it is rotated to working memory, for some stacks at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dkfac.config.optimizer_rules import Rule
from dkfac.factors.layer_state import LayerState
from dkfac.factors.stacks import Stack
from dkfac.ops import adam_length_kernels as adam
from dkfac.ops import adaptive_kernels as passes
from dkfac.ops import many, tile_products
from dkfac.ops.decompose import Eigen
from dkfac.ops.kernels import launch_kernel
from dkfac.ops.many import on_device
from dkfac.ops.precision import tf32
from dkfac.ops.precondition import INPUT_KEYS, OUTPUT_KEYS, of_side, rotate
from dkfac.ops.tile_products import Strip
from dkfac.precondition import adam_eigen, adaptive

MOST_WORK = 2**25
"""Elements of working memory, unless a single stack needs more."""
CONSTANTS = {
    name: getattr(adaptive, name) for name in ("RATE", "MARGIN", "LEAST", "MOST", "SHORTEST", "RECOVER", "OPPOSED")
}


def can_step(stacks: Sequence[Stack], states: dict[str, LayerState]) -> bool:
    tensors = [t for s in stacks for name in ("momentum", "moments") for t in s.moments(states, name)]
    tensors += [t for stack in stacks for t in stack.adaptive(states)]
    return many.are_usable(*tensors, *(s.buffer for s in stacks)) and all(t.is_contiguous() for t in tensors)


class AdaptiveSteps:
    """Steps layers, which are counted in the order of the stacks."""

    def __init__(
        self, stacks: list[Stack], states: dict[str, LayerState], given: dict[int, Rule],
        may_round: Callable[[Stack], bool],
    ) -> None:  # fmt: skip
        number, device = sum(stack.num_layers for stack in stacks), stacks[0].device
        self.scales, self.after = torch.zeros(2, number, device=device)
        """By layer: what its update is to be multiplied by, and the norm that it then has, or that of the gradient if
        the update is not finite."""
        self.sane = torch.zeros(number, dtype=torch.bool, device=device)
        """By layer: whether its update is finite."""
        self._signs: list[tuple[Tensor, float]] = []
        first, places = 0, dict[Stack, int]()
        for stack in stacks:
            places[stack] = first
            first += stack.num_layers
            sign = given[id(stack.layers[0].weight)].sign
            self._signs += [(stack.buffer, sign)] if sign != 1 else []
        self._batches = [
            _Batch(batch, places, states, given[id(batch[0].layers[0].weight)], may_round)
            for batch in _batches(stacks, given)
        ]

    def run(self, good: Tensor, before: Tensor) -> None:
        """Replace the gradients by updates. ``before``: the norms of the gradients."""
        for buffer, sign in self._signs:
            buffer.mul_(sign)
        for batch in self._batches:
            batch.run(good, before, self.scales, self.sane, self.after)


def _batches(stacks: Sequence[Stack], given: dict[int, Rule]) -> list[list[Stack]]:
    """Return stacks in batches that are stepped one after the other."""
    batches: list[list[Stack]] = []
    last: dict[Any, list[Stack]] = {}
    for stack in stacks:
        rule = given[id(stack.layers[0].weight)]
        kind = (rule.betas, rule.eps, rule.nesterov, rule.length, _is_aligned(stack))
        batch = last.get(kind)
        if batch is None or (rule.length == "adam" and _size([*batch, stack]) > MOST_WORK):
            batch = last[kind] = []
            batches.append(batch)
        batch.append(stack)
    return batches


def _size(stacks: Sequence[Stack]) -> int:
    return sum(stack.num_layers * stack.elements_laid_out for stack in stacks)


def _is_aligned(stack: Stack) -> bool:
    """Whether kernels may read four elements at once."""
    return stack.elements_laid_out % 4 == 0 and stack.padded[1] % 4 == 0


class _Batch:
    def __init__(
        self, stacks: list[Stack], places: dict[Stack, int], states: dict[str, LayerState], rule: Rule,
        may_round: Callable[[Stack], bool],
    ) -> None:  # fmt: skip
        self._rule, self._device = rule, stacks[0].device
        self._is_adam = rule.length == "adam"
        self._work = _size(stacks) if self._is_adam else 0
        self._constants = {"ALIGNED": int(_is_aligned(stacks[0])), **passes.PER_PROGRAM}
        self._tile_constants = {"ALIGNED": self._constants["ALIGNED"], **adam.PER_TILE}
        self._others: list[tuple[Tensor, int, dict[str, Eigen], bool]] = []
        """Stacks whose products are torch's: buffer, place in working memory, bases, whether they may be rounded."""
        layers, chunks, pieces, tiles, order = (list[Any]() for _ in range(5))
        strips: dict[str, list[Strip]] = {"right": [], "left": []}
        offset = row_sums = column_sums = 0
        for stack in stacks:
            momentum, mean_weight = stack.moments(states, "momentum")
            square, square_weight = stack.moments(states, "moments")
            log_damping, log_length, rows, columns = stack.adaptive(states)
            size = 4 * stack.elements_laid_out
            (down, across), vectors = stack.padded, (mean_weight, square_weight, log_damping, log_length)
            for n in range(stack.num_layers):
                number, first_tile = -(-stack.elements_laid_out // passes.PER_PROGRAM["CHUNK"]), len(tiles)
                for block in range(n * stack.blocks, (n + 1) * stack.blocks) if self._is_adam else ():
                    grid = -(-down // adam.PER_TILE["DOWN"]), -(-across // adam.PER_TILE["ACROSS"])
                    tiles += [[len(pieces), i, j] for i in range(grid[0]) for j in range(grid[1])]
                    part = 4 * block * down * across
                    addresses = [stack.buffer.data_ptr() + part, momentum.data_ptr() + part]
                    addresses += [rows.data_ptr() + 4 * block * down, columns.data_ptr() + 4 * block * across]
                    parts = [row_sums, column_sums, grid[1], grid[0]]
                    pieces.append([*addresses, down, across, *parts, len(layers), offset + part, *[0] * 4])
                    row_sums, column_sums = row_sums + grid[1] * down, column_sums + grid[0] * across
                kept = offset + n * size if self._is_adam else momentum.data_ptr() + n * size
                chunks += [[len(layers), i] for i in range(number)]
                layers.append([
                    stack.buffer.data_ptr() + n * size, kept, square.data_ptr() + n * size, stack.elements_laid_out,
                    len(chunks) - number, number, *(v.data_ptr() + 4 * n for v in vectors), stack.elements,
                    first_tile, len(tiles) - first_tile, 0, 0, 0,
                ])  # fmt: skip
                order.append([places[stack] + n])
            in_use = adam_eigen.bases(stack, states)
            if may_round(stack) and _are_tiles(in_use):
                _add_strips(strips, stack, in_use, offset if self._is_adam else None)
            elif in_use:
                self._others.append((stack.buffer, offset // 4, in_use, may_round(stack)))
            offset += size * stack.num_layers
        self._num_layers, self._num_chunks, self._num_pieces = len(layers), len(chunks), len(pieces)
        self._sums = row_sums, column_sums
        self._layers, self._chunks = on_device(layers, self._device), on_device(chunks, self._device, torch.int32)
        self._pieces, self._tiles = on_device(pieces, self._device), on_device(tiles, self._device, torch.int32)
        counts = [[-(-size // adam.PER_SEGMENT["BLOCK"]) for size in piece[4:6]] for piece in pieces]
        segments = [
            [i, side, n] for i, each in enumerate(counts) for side, count in enumerate(each) for n in range(count)
        ]
        self._segments, self._num_segments = on_device(segments, self._device, torch.int32), len(segments)
        self._num_tiles, self._order = len(tiles), on_device(order, self._device)
        self._products = [
            tile_products.describe_products(found, self._device, left=side == "left") for side, found in strips.items()
        ]
        back = {side: [strip for strip in found if not strip.in_work] for side, found in strips.items()}
        self._products_back = [
            tile_products.describe_products(found, self._device, left=side == "left") for side, found in back.items()
        ]

    def run(self, good: Tensor, before: Tensor, scales: Tensor, sane: Tensor, after: Tensor) -> None:
        rule, flags, new = self._rule, self._constants, self._new
        layers, chunks, works = self._layers, self._chunks, {"WORKS": int(self._is_adam)}
        work, partial = new(max(1, self._work)), new(self._num_chunks, 8)
        values = new(self._num_layers, passes.NUM_VALUES)
        totals = self._adam_sums(work, good) if self._is_adam else values
        self._rotate(work)
        launch_kernel(passes.total_kernel, self._num_chunks, layers, chunks, partial, **flags)
        launch_kernel(passes.open_kernel, self._num_layers, layers, partial, values, BLOCK=128)
        launch_kernel(
            passes.judge_kernel, self._num_chunks, layers, chunks, values, work, good, partial, **flags, **works
        )
        (keep, keep_square), ratio = rule.betas, rule.betas[0] ** 2 / max(rule.betas[1], 1e-12)
        follow = (keep, keep_square, 1 - keep, 1 - keep_square, ratio, adaptive.SURPRISE[rule.length])
        launch_kernel(
            passes.follow_kernel, self._num_layers, layers, partial, values, good, *follow,
            **CONSTANTS, BOUNDED=int(ratio < 1), BLOCK=128,
        )  # fmt: skip
        lengths = self._adam_lengths(values, totals) if self._is_adam else values
        launch_kernel(
            passes.update_kernel, self._num_chunks, layers, chunks, values, work, good, partial, keep, keep_square,
            NESTEROV=int(rule.nesterov), **flags, **works,
        )  # fmt: skip
        launch_kernel(
            passes.close_kernel, self._num_layers, layers, partial, lengths, self._order, before, scales, sane, after,
            ADAM=int(self._is_adam), BLOCK=128,
        )  # fmt: skip
        for buffer, _, in_use, rounds in self._others:
            with tf32(rounds, buffer.device):
                buffer.copy_(rotate(buffer, in_use, back=True))
        for products in reversed(self._products_back):
            tile_products.multiply_tiles(products, work, back=True)

    def _new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def _rotate(self, work: Tensor) -> None:
        """Bring gradients to the eigenbases, and the momenta in working memory."""
        for buffer, begin, in_use, rounds in self._others:
            both = [buffer, work[begin : begin + buffer.numel()].view_as(buffer)] if self._is_adam else [buffer]
            with tf32(rounds, buffer.device):
                for values in both:
                    values.copy_(rotate(values, in_use))
        for products in self._products:
            tile_products.multiply_tiles(products, work, back=False)

    def _adam_sums(self, work: Tensor, good: Tensor) -> Tensor:
        """Copy the momenta to working memory. Update them, and the second moments of rows and columns; return the sums
        of those of rows."""
        row_sums, column_sums, totals = (self._new(n) for n in (*self._sums, self._num_pieces))
        (keep, keep_square), constants = self._rule.betas, self._tile_constants
        launch_kernel(
            adam.sides_kernel, self._num_tiles, self._pieces, self._tiles, work, good, row_sums, column_sums, keep,
            **constants,
        )  # fmt: skip
        launch_kernel(
            adam.collect_kernel, self._num_segments, self._pieces, self._segments, good, row_sums, column_sums,
            keep_square, **adam.PER_SEGMENT,
        )  # fmt: skip
        launch_kernel(adam.row_totals_kernel, self._num_pieces, self._pieces, totals, BLOCK=1024)
        return totals

    def _adam_lengths(self, values: Tensor, totals: Tensor) -> Tensor:
        """Return the sums of squares of Adam's own updates, by tile."""
        lengths = self._new(self._num_tiles)
        eps = self._rule.eps or torch.finfo(torch.float32).tiny
        launch_kernel(
            adam.length_kernel, self._num_tiles, self._pieces, self._tiles, self._layers, values, totals, lengths,
            eps, **self._tile_constants,
        )  # fmt: skip
        return lengths


def _are_tiles(bases: dict[str, Eigen]) -> bool:
    """Whether the kernel can multiply by these bases."""
    vectors = [d.vectors for d in bases.values() if d.vectors is not None]
    return "A_C" not in bases and all(
        v.dtype == torch.float32 and v.is_contiguous() and v.shape[-1] <= tile_products.MOST_WIDTH for v in vectors
    )


def _add_strips(strips: dict[str, list[Strip]], stack: Stack, bases: dict[str, Eigen], offset: int | None) -> None:
    """Add the products of a stack's gradients, and of momenta at an ``offset`` in working memory."""
    down, across = stack.padded
    for side, keys, lines, step in (("right", INPUT_KEYS, down, 1), ("left", OUTPUT_KEYS, across, across)):
        begin = 0
        for vectors in [d.vectors for d in of_side(bases, keys)]:
            if vectors is None:
                continue
            width, number = vectors.shape[-1], len(vectors) // len(stack.buffer)
            for n in range(len(vectors)):
                place = 4 * (n // number * down * across + (begin + n % number * width) * step)
                matrix = vectors.data_ptr() + 4 * n * width * width
                given = matrix, lines, width, across
                strips[side].append(Strip(stack.buffer.data_ptr() + place, *given))
                if offset is not None:
                    strips[side].append(Strip(offset + place, *given, in_work=True))
            begin += number * width
