"""The small network that the self-test trains, on all ranks and on each rank alone.

Input: settings of K-FAC, the ranks. Output: weights, and what was sent. Owns: nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dkfac.comm import collectives, replicas
from dkfac.kfac import KFAC
from dkfac.runtime.connect import LOOPBACK

TEST_STEPS, EXAMPLES_PER_RANK = 5, 8
SETTINGS: dict[str, Any] = {
    "curvature": "kfac", "solver": "eigen", "damping": 1e-2, "tf32": False, "cuda_graph": False, "spread_refresh": 1,
    "statistics_fraction": 1.0, "warmup_refresh": None, "factor_interval": 1, "inverse_interval": 2, "announce": False,
}  # fmt: skip
"""Settings under which the steps do not depend on the number of ranks but for rounding."""


@dataclass(slots=True)
class TrainedNetwork:
    weights: Tensor
    seconds: float = 0.0
    """Of the last step."""
    expected_bytes: list[tuple[str, int]] = field(default_factory=list)
    sent_bytes: list[tuple[str, int]] = field(default_factory=list)
    """Kinds of collectives and the bytes that this rank passed to them, as the program says and as they were."""
    peak_bytes: int = 0
    """Most memory of the GPU in use."""
    lacking_layers: int = 0
    """Layers that the gathered state lacks, on rank 0."""


def build_network(device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 6, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(54, 24), nn.Tanh(), nn.Linear(24, 16)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(16, 5, bias=False)).to(device, dtype)


def whole_batch(step: int, num_examples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(num_examples, 2, 8, 8, generator=generator, dtype=torch.float64)
    return x, (x.flatten(1)[:, :5] + torch.randn(num_examples, 5, generator=generator)).argmax(1)


def train_network(
    ranks: tuple[int, int], device: torch.device, *, alone: Any = None, dtype: torch.dtype = torch.float64,
    gathers: bool = False, **options: Any,
) -> TrainedNetwork:  # fmt: skip
    """Train on this rank's share of each batch, under DDP; with ``alone``, a group of this rank, on all of it."""
    rank, world_size = ranks if alone is None else (0, 1)
    model = build_network(device, dtype)
    network = model if alone is not None else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with _path_of_ranks() if alone is None else contextlib.nullcontext():
        kfac = KFAC(network, optimizer, process_group=alone, **(SETTINGS | options))
    found = TrainedNetwork(torch.empty(0))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    program = kfac.instruments().transport.program
    for step in range(TEST_STEPS):
        x, y = (t.chunk(world_size)[rank] for t in whole_batch(step, EXAMPLES_PER_RANK * ranks[1]))
        optimizer.zero_grad()
        begin = time.perf_counter()
        F.cross_entropy(network(x.to(device, dtype)), y.to(device)).backward()  # type: ignore[no-untyped-call]
        with _counting(found.sent_bytes):
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.seconds = time.perf_counter() - begin
        refreshes = step % 2 == 0
        steps = program.of(
            ranks[0], measures=True, decomposes=refreshes, compares=refreshes or step < replicas.FIRST_STEPS
        )
        kinds = ["largest" if t.stage == "replicas" else _KINDS[t.how] for t in steps]
        found.expected_bytes += zip(kinds, (t.num_bytes(ranks[0]) for t in steps), strict=True)
    if device.type == "cuda":
        found.peak_bytes = torch.cuda.max_memory_allocated(device)
    if gathers:
        state = kfac.state_dict(gather=True)
        found.lacking_layers = rank == 0 and len(kfac.layers) - len(state["layers"])
    found.weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    kfac.close()
    return found


@contextlib.contextmanager
def _path_of_ranks() -> Iterator[None]:
    """Let a K-FAC that is attached here take the path of several ranks, also if there is one."""
    os.environ[LOOPBACK] = "1"
    try:
        yield
    finally:
        del os.environ[LOOPBACK]


_KINDS: dict[str, str] = {
    "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter", "collect": "exchange", "deal": "exchange",
    "all-gather": "all_gather", "rows": "exchange",
}  # fmt: skip
"""Functions of ``dkfac.comm.collectives`` by how a transfer is made."""


@contextlib.contextmanager
def _counting(sent: list[tuple[str, int]]) -> Iterator[None]:
    """Note the bytes that are passed to each of K-FAC's collectives."""
    names = sorted({*_KINDS.values(), "largest"})
    before: dict[str, Callable[..., Any]] = {name: getattr(collectives, name) for name in names}

    def counted(name: str) -> Callable[..., Any]:
        def call(flat: Tensor, *rest: Any) -> Any:
            sent.append((name, flat.numel() * flat.element_size()))
            return before[name](flat, *rest)

        return call

    for name in names:
        setattr(collectives, name, counted(name))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(collectives, name, function)
