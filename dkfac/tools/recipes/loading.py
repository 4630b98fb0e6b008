"""Batches of examples for ranks and micro-batches, loaded while others are trained on."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from dkfac.tools.recipes.recipe import Examples

AHEAD = 2
"""Micro-batches that wait."""


def steps(num_pictures: int, batch: int, *, seed: int, first: int = 0) -> Iterator[Tensor]:
    """Yield the numbers of each step's pictures, from step ``first`` on, without end: one shuffled pass after another,
    a batch across their border where they do not divide. The same for the same seed, wherever it begins."""
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
    """Return a rank's share of a step, in equal parts of at most ``size``; all ranks have as many, of the same size."""
    if len(index) % world_size:
        raise ValueError(f"a batch of {len(index)} cannot be shared equally by {world_size} ranks: choose a multiple")
    share = len(index) // world_size
    number = -(-share // size)
    while share % number:
        number += 1
    return list(index[rank * share : (rank + 1) * share].chunk(number))


def ahead(
    examples: Examples, parts: Iterator[Tensor], *, seed: int | None, device: torch.device
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """Yield inputs and targets on the device, read by a thread while earlier ones are used."""
    ready: queue.Queue[tuple[Tensor, Tensor] | BaseException | None] = queue.Queue(AHEAD)
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
            if isinstance(item, (ValueError, OSError)):  # a file, no wrong option: whichever rank met it says so
                raise RuntimeError(str(item)) from item
            if isinstance(item, BaseException):
                raise item
            yield item[0].to(device, non_blocking=True), item[1].to(device, non_blocking=True)
    finally:
        stopped.set()
        thread.join()


def normalised(pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return pixels of about mean 0 and deviation 1, with the figures of ImageNet for colours."""
    mean, deviation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)) if pixels.shape[1] == 3 else ((0.5,), (0.25,))
    m, d = (torch.tensor(t, device=pixels.device, dtype=dtype).view(1, -1, 1, 1) for t in (mean, deviation))
    return (pixels.to(dtype) / 255 - m) / d
