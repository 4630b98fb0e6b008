"""Compare ranks that should hold the same model: step, learning rates, weights, and gradients before they are used.

Input: this rank's parameters when it takes a step. Output: at the next step an error on all ranks, which names the
ranks and the parameter that differ. Owns: the comparison in flight. The step that launches it does not wait for it.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dkfac.comm import agree, collectives
from dkfac.comm.transport import Transport
from dkfac.ops import constants
from dkfac.ops.bit_sums import bit_sums
from dkfac.ops.host_copy import HostCopy
from dkfac.plan.program import REPLICAS_FIXED

ABSENT = torch.iinfo(torch.int64).min
"""What a rank says of something that it does not have: it is larger than nothing, and so is its negative."""
FIRST_STEPS = 2
"""Steps after attaching or loading that are compared whether they refresh or not."""
HASHES = 1 << 16
OFF = 'If replicas are to differ, say so: experimental={"replicas_may_differ": True}.'


class Replicas:
    """The comparison of ranks that train replicas of a model."""

    def __init__(self, transport: Transport, model: nn.Module, names: Sequence[str], optimizer: Any) -> None:
        """``names``: the parameters that are compared, the same on all ranks; none: replicas may differ."""
        self._transport, self._model, self._names, self._optimizer = transport, model, names, optimizer
        self._age, self._step, self._has_batch = 0, 0, True
        self._own: Tensor | None = None
        self._pending: collectives.Pending | None = None
        self._copy: HostCopy | None = None

    def begin_anew(self) -> None:
        """Compare the next steps as if K-FAC had just been attached, because another state was loaded."""
        self._own, self._pending, self._copy, self._age = None, None, None, 0

    def header(self) -> list[float]:
        """Return what the header says of this rank's step and learning rates."""
        if not self._has_batch:  # its loop, and so its schedule, has ended
            return [0.0] * 5
        here, rate = self._step % HASHES, _hash(self._rates()) % HASHES if self._names else 0
        return [1.0, float(here), float(here * here), float(rate), float(rate * rate)]

    def begin_step(self, step: int, *, refreshes: bool, has_batch: bool = True) -> None:
        """Raise what the last comparison found; if this is a step for one, read weights and gradients before they
        change."""
        self._raise_differences()
        self._own = None
        self._age, self._step, self._has_batch = self._age + 1, step, has_batch
        if not (refreshes or self._age <= FIRST_STEPS) or not self._transport.program.stage("replicas"):
            return
        device = self._transport.device
        if has_batch:
            parameters, rates = dict(self._model.named_parameters()), self._rates()
            found = [parameters.get(name) for name in self._names]
            fixed = torch.tensor([step, _hash(rates)]).to(device, non_blocking=True)
            live = bit_sums([r for r in rates if isinstance(r, Tensor)], device).sum(0, keepdim=True)
            gradients = [None if p is None else p.grad for p in found]
            self._own = torch.cat([fixed, live, _sums(found, device), _sums(gradients, device)])
        else:
            self._own = torch.full((REPLICAS_FIXED + 2 * len(self._names),), ABSENT, device=device)

    def compare(self) -> None:
        """Launch the comparison of what was read in this step. A collective, after those of the factors: of these
        some ranks may have launched more than others in their backward passes."""
        if self._own is None or self._pending is not None or self._copy is not None:
            return
        self._pending = collectives.largest(torch.cat([self._own, -self._own]), self._transport.groups.everyone)
        if self._own.device.type != "cpu":
            self._copy, self._pending = HostCopy(self._pending.wait()), None

    def _raise_differences(self) -> None:
        """Raise, on all ranks, what the last comparison found; it was launched a step ago."""
        if self._pending is not None:
            self._copy, self._pending = HostCopy(self._pending.wait()), None
        if self._copy is None or self._own is None:
            return
        numbers, own, self._copy, self._own = self._copy.read(), self._own, None, None
        half = len(numbers) // 2
        if all(a == -b or a == b == ABSENT for a, b in zip(numbers[:half], numbers[half:], strict=True)):
            return
        gathered = collectives.all_gather(own, self._transport.groups.everyone).wait()
        raise RuntimeError(self._difference(gathered.view(self._transport.world_size, -1)))

    def raise_difference(self) -> NoReturn:
        """Raise, because the header says that ranks are not at the same step or have other learning rates. A
        collective."""
        told = agree.exchange_text(self._transport.groups, self._described(), self._transport.device)
        raise RuntimeError(_differing_rates({rank: text for rank, text in enumerate(told) if text}))

    def _difference(self, by_rank: Tensor) -> str:
        """Return what differs first, and on which ranks. A collective."""
        told = agree.exchange_text(self._transport.groups, self._described(), self._transport.device)
        present = [rank for rank, row in enumerate(by_rank[:, 0].tolist()) if row != ABSENT]
        first = int((by_rank[present] != by_rank[present[0]]).any(0).nonzero()[0])
        if first < REPLICAS_FIXED:
            return _differing_rates({rank: told[rank] for rank in present})
        step, place = int(by_rank[present[0], 0]), first - REPLICAS_FIXED
        name = self._names[place % len(self._names)]
        who = _who_differs(dict(zip(present, by_rank[present, first].tolist(), strict=True)))
        if place < len(self._names):
            return (
                f"the ranks' weights differ before step {step}: {who} in {name!r}, the first parameter that differs. "
                f"Load the same weights on all ranks before K-FAC is attached, or wrap the model in "
                f"DistributedDataParallel, which sends rank 0's. {OFF}"
            )
        return (
            f"the ranks' gradients differ at step {step}: {who} in {name!r}, the first parameter that differs. Wrap "
            f"the model in DistributedDataParallel, and call it, not the module inside it; the last backward before "
            f"optimizer.step() must not be under no_sync(). {OFF}"
        )

    def _rates(self) -> list[Any]:
        return [] if self._optimizer is None else [group.get("lr") for group in self._optimizer.param_groups]

    def _described(self) -> str:
        """Return this rank's step and learning rates, for a message. Synchronizes with the device."""
        rates = ", ".join(dict.fromkeys(f"{float(rate):.9g}" for rate in self._rates() if rate is not None))
        return f"step {self._step}, lr {rates}" if rates else f"step {self._step}"


def compared_parameters(model: nn.Module, trained: Sequence[Tensor] | None) -> tuple[str, ...]:
    """Return the names of the parameters that ranks hold replicas of: trained, not sharded, not left out by DDP."""
    ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    chosen = None if trained is None else {id(p) for p in trained}
    return tuple(
        name
        for name, p in model.named_parameters()
        if p.requires_grad
        and name not in ignored
        and not isinstance(p, DTensor)
        and (chosen is None or id(p) in chosen)
    )


def _sums(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Return the bit sums; zero where there is no gradient, which is stepped like a zero one."""
    places = [i for i, t in enumerate(tensors) if t is not None and not t.is_sparse]
    found = bit_sums([t for t in tensors if t is not None and not t.is_sparse], device)
    if len(places) == len(tensors):
        return found
    blank = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    return blank.index_copy(0, constants.constant(tuple(places), device, torch.int64), found)


def _hash(rates: list[Any]) -> int:
    """Return a hash of the learning rates that the host knows; nine digits, as hosts may round differently."""
    return zlib.crc32(" ".join(f"{rate:.9g}" for rate in rates if isinstance(rate, int | float)).encode())


def header_agrees(numbers: list[float]) -> bool:
    """Return whether what ranks said in the header, summed, was the same. Sums of integers are exact."""
    ranks, here, here_squared, rate, rate_squared = (int(number) for number in numbers)
    return ranks * here_squared == here * here and ranks * rate_squared == rate * rate


def _who_differs(values: dict[int, Any]) -> str:
    """Return which ranks have another value than most; if there is no such majority, those that do not agree."""
    common, number = Counter(values.values()).most_common(1)[0]
    odd = [rank for rank, value in values.items() if value != common]
    if 2 * number > len(values):
        return f"rank{'s' if odd[1:] else ''} {_listed(odd)} differ{'' if odd[1:] else 's'} from the others"
    return f"ranks {_listed(list(values))} do not agree"


def _differing_rates(told: dict[int, str]) -> str:
    """Return the message for ranks at other steps or with other learning rates. ``told``: what each described."""
    ranks: dict[str, list[int]] = {}
    for rank, text in told.items():
        ranks.setdefault(text, []).append(rank)
    said = "; ".join(f"{text} on rank{'s' if some[1:] else ''} {_listed(some)}" for text, some in ranks.items())
    return (
        f"the ranks are not at the same step, or have different learning rates: {_who_differs(told)} ({said}). Each "
        f"rank takes every step, loads the same checkpoint and has the same learning rate: a loss that a schedule "
        f"follows is reduced first. {OFF}"
    )


def _listed(ranks: list[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return ", ".join(map(str, ranks[:8])) + more
