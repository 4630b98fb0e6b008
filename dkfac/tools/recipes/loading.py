"""Batches for ranks and micro-batches, prefetched by a thread.

Input: a data set, a seed. Output: inputs and targets on the device. Owns: the prefetching thread and its queue.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from dkfac.tools.recipes.recipe import Examples

_PREFETCHED = 2
"""Number of micro-batches in the queue."""


def batch_indices(num_pictures: int, batch: int, *, seed: int, first: int = 0) -> Iterator[Tensor]:
    """Yield the indices of the examples of each step, from step ``first`` on, without end.

    The data set is reshuffled in each epoch; a batch may span two epochs. Step ``n`` has the same indices for the
    same seed, whatever ``first`` is.
    """
    begin = first * batch
    number, skipped = divmod(begin, num_pictures)
    waiting = _pass(num_pictures, seed, number)[skipped:]
    while True:
        while len(waiting) < batch:
            number += 1
            waiting = torch.cat([waiting, _pass(num_pictures, seed, number)])
        yield waiting[:batch]
        waiting = waiting[batch:]


def _pass(num_pictures: int, seed: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    return torch.randperm(num_pictures, generator=generator)


def micro_batches(index: Tensor, size: int, *, rank: int = 0, world_size: int = 1) -> list[Tensor]:
    """Return a rank's share of a batch as equal micro-batches of at most ``size`` examples, the same number on all
    ranks."""
    if len(index) % world_size:
        raise ValueError(f"a batch of {len(index)} cannot be divided equally by {world_size} ranks: use a multiple")
    share = len(index) // world_size
    number = -(-share // size)
    while share % number:
        number += 1
    return list(index[rank * share : (rank + 1) * share].chunk(number))


def prefetch(
    examples: Examples, parts: Iterator[Tensor], *, seed: int | None, device: torch.device
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yield inputs and targets on the device; a thread reads the next ones in the meantime."""
    ready: queue.Queue[tuple[Tensor, Tensor] | BaseException | None] = queue.Queue(_PREFETCHED)
    stopped = threading.Event()

    def put(item: tuple[Tensor, Tensor] | BaseException | None) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return

    def work() -> None:
        try:
            for index in parts:
                if stopped.is_set():
                    return
                x, y = examples.get(index, seed=None if seed is None else hash((seed, int(index[0]))))
                put((x.pin_memory(), y.pin_memory()) if device.type == "cuda" else (x, y))
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, daemon=True, name="dkfac-load")
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(
                item, (ValueError, OSError)
            ):  # a bad file, not a wrong option: the rank that found it reports it
                raise RuntimeError(str(item)) from item
            if isinstance(item, BaseException):
                raise item
            yield item[0].to(device, non_blocking=True), item[1].to(device, non_blocking=True)
    finally:
        stopped.set()
        thread.join()


def normalize_pixels(pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return pixels with a mean of about 0 and a standard deviation of about 1, by ImageNet's values for RGB."""
    mean, deviation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)) if pixels.shape[1] == 3 else ((0.5,), (0.25,))
    m, d = (torch.tensor(t, device=pixels.device, dtype=dtype).view(1, -1, 1, 1) for t in (mean, deviation))
    return (pixels.to(dtype) / 255 - m) / d
