"""The checks of the self-test. Each is a collective call that returns one number and the limit it should not exceed.

Input: the ranks and their device. Output: numbers of this rank. Owns: the group of this rank alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dkfac import distributed
from dkfac.plan.strategies import STRATEGIES
from dkfac.tools.selftest.network import TrainedNetwork, train_network

EXACT, ROUNDED = 1e-9, 0.05
"""Limits of the difference from one process, relative to the largest weight: in float64, and where the wire rounds."""
QUICK = ("comm-opt", "sharded")
"""Strategies of a quick test, which between them use every kind of collective."""


@dataclass(frozen=True, slots=True)
class NamedCheck:
    name: str
    what: str
    limit: float
    run: Callable[[], tuple[float, dict[str, Any]]]
    """Returns this rank's number, and details for the report."""


def all_checks(ranks: tuple[int, int], device: torch.device, alone: Any, *, is_quick: bool) -> Iterator[NamedCheck]:
    """Yield the checks in order: what may hang last. ``alone``: a group of this rank only."""
    reference: list[TrainedNetwork] = []

    def difference(options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        if not reference:
            reference.append(train_network(ranks, device, alone=alone))
        found, one = train_network(ranks, device, gathers=True, **options), reference[0].weights
        far = float((found.weights - one).abs().max() / one.abs().max())
        details = {"step_seconds": found.seconds, "peak_bytes": found.peak_bytes}
        return far if found.lacking_layers == 0 and far == far else float("inf"), details

    def parity(name: str, limit: float, **options: Any) -> NamedCheck:
        return NamedCheck(name, "weights less those of one process", limit, partial(difference, options))

    for name in STRATEGIES if not is_quick else QUICK:
        if name != "local":
            yield parity(f"parity, {name}", EXACT, strategy=name)
    yield parity('parity, share="weights"', EXACT, strategy="sharded", share="weights")
    for dtype in ("bfloat16", "float16"):
        yield parity(f"wire, {dtype}", ROUNDED, strategy="comm-opt", wire_dtype=dtype)
    what = "weights of the ranks, with factors of their own"
    yield NamedCheck("ranks agree", what, 0.0, partial(_disagreement, ranks, device))
    for name in STRATEGIES if not is_quick else QUICK:
        what = f"bytes under {name} that its program does not say"
        yield NamedCheck(f"bytes, {name}", what, 0.0, partial(_unforeseen_bytes, ranks, device, name))
    yield NamedCheck("overlap", "weights with overlap less those without", 0.0, partial(_overlap, ranks, device))


def _disagreement(ranks: tuple[int, int], device: torch.device) -> tuple[float, dict[str, Any]]:
    weights = train_network(ranks, device, strategy="local").weights
    everyone = torch.tensor(distributed.gather(weights.tolist(), device))
    return float((everyone - everyone[0]).abs().max()), {}


def _unforeseen_bytes(ranks: tuple[int, int], device: torch.device, strategy: str) -> tuple[float, dict[str, Any]]:
    found = train_network(ranks, device, strategy=strategy)
    said, sent = Counter(found.expected_bytes), Counter(found.sent_bytes)
    unforeseen = sum(number * times for (_, number), times in ((said - sent) + (sent - said)).items())
    by_kind = Counter[str]()
    for kind, number in found.sent_bytes:
        by_kind[kind] += number
    return float(unforeseen), {"bytes": dict(by_kind)}


def _overlap(ranks: tuple[int, int], device: torch.device) -> tuple[float, dict[str, Any]]:
    off = train_network(ranks, device, strategy="comm-opt", experimental={"fusion": "optimal"})
    try:
        on = train_network(ranks, device, strategy="comm-opt", experimental={"fusion": "optimal", "overlap": True})
    except ValueError as error:  # as it should be with NCCL
        return 0.0, {"refused": str(error), "step_seconds_off": off.seconds}
    details = {"step_seconds_off": off.seconds, "step_seconds_on": on.seconds}
    return float((on.weights - off.weights).abs().max()), details
