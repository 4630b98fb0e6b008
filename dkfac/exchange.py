"""Carries out a program's transfers: tensors by layer and key into flat buffers, over the network, and out again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dkfac.comm import agree, collectives
from dkfac.comm.collectives import Pending
from dkfac.comm.groups import Groups
from dkfac.ops.factors import gram
from dkfac.ops.pack import pack_triangle, unpack_triangle
from dkfac.plan.plan import Plan
from dkfac.plan.program import Part, Program, Stage, Transfer
from dkfac.plan.spec import FactorSpec

Named = dict[tuple[str, str], Tensor]
"""Tensors by layer and key."""


class Exchange:
    """The network as one rank sees it through its plan."""

    def __init__(self, plan: Plan, program: Program, groups: Groups, device: torch.device) -> None:
        self.plan, self.program, self.groups, self.device = plan, program, groups, device
        self.rank, self.world_size = groups.rank, groups.world_size
        groups.make(t.group for t in program.transfers)
        self._factors = {(la.name, factor.key): factor for la in plan.layers for factor in la.factors}
        self._dtypes = {layer.name: _dtype(layer.dtype) for layer in plan.layers}
        self._launched: list[tuple[Transfer, Pending]] = []
        self.num_launched = 0
        """Buckets of this step that are on their way."""
        self.num_buckets = 1 + max((t.bucket for t in program.stage("factors")), default=-1)

    def only(self, stage: Stage, kept: Container[tuple[str, str]]) -> Exchange:
        """Return the same network with nothing but these, as (layer, key), in a stage."""
        found = copy.copy(self)
        found.program = self.program.only(stage, kept)
        found._launched = []
        return found

    # --- small vectors -------------------------------------------------------------------------------------

    def launch_sum(self, stage: Stage, values: Sequence[Tensor | float]) -> Pending:
        """Launch the sum over ranks of a few numbers, in float64."""
        (transfer,) = self.program.stage(stage)
        assert len(values) == transfer.used, f"{stage}: {len(values)} numbers, the program says {transfer.used}"
        return collectives.all_reduce(vector(values, self.device), self.groups.everyone)

    def sum(self, stage: Stage, values: Sequence[Tensor | float]) -> Tensor:
        return self.launch_sum(stage, values).wait()

    def sum_vector(self, stage: Stage, values: Tensor) -> Tensor:
        """Return the sum over ranks of a float64 vector."""
        (transfer,) = self.program.stage(stage)
        assert values.numel() == transfer.used, f"{stage}: {values.numel()} instead of {transfer.used} numbers"
        return collectives.all_reduce(values.to(self.device).contiguous(), self.groups.everyone).wait()

    # --- factors -------------------------------------------------------------------------------------------

    def launch_factors(self, bucket: int, sums: Named, scales: Named) -> list[tuple[Transfer, Pending]]:
        """Launch the reductions of a bucket; a sum that is not there counts as zero.

        ``scales``: what sums are divided by on the wire, where its dtype has little range.
        """
        launched = []
        for transfer in self.program.stage("factors"):
            if transfer.bucket != bucket or transfer.how in ("collect", "rows"):
                continue
            flat = torch.zeros(transfer.elements(self.rank), dtype=_dtype(transfer.dtype), device=self.device)
            for part, place in _places(transfer.parts, flat):
                total = sums.get((part.layer, part.key))
                if total is not None:
                    scale = scales.get((part.layer, part.key))
                    self._pack(part, total if scale is None else total / scale, place)
            if transfer.how == "all-reduce":
                pending = collectives.all_reduce(flat, self.groups.everyone)
            else:
                wide = torch.promote_types(flat.dtype, torch.float32)
                pending = collectives.reduce_scatter(flat, self.groups.everyone, wide)
            launched.append((transfer, pending))
        return launched

    def launch_rest(self, sums: Named, scales: Named) -> list[tuple[Transfer, Pending]]:
        """Return the reductions of all buckets, launching those that have not been."""
        for bucket in range(self.num_launched, self.num_buckets):
            self._launched += self.launch_factors(bucket, sums, scales)
        launched, self._launched, self.num_launched = self._launched, [], 0
        return launched

    def launch_early(self, sums: Named) -> None:
        """Launch the next bucket during forward or backward."""
        self._launched += self.launch_factors(self.num_launched, sums, {})
        self.num_launched += 1

    def drop_launched(self) -> None:
        """Launch the buckets that are left, of zeros, wait for all and forget them: the step will not be taken.

        Ranks may have launched different numbers of them.
        """
        for _, pending in self.launch_rest({}, {}):
            pending.wait()

    def launch_rows(self, rows: Named) -> list[tuple[Transfer, Pending]]:
        """Launch what travels as rows ``[R, D]``, R at most what the plan has room for; the rest stays zero."""
        launched = []
        for transfer in (t for t in self.program.stage("factors") if t.how == "rows"):
            flat = torch.zeros(transfer.elements(self.rank), dtype=_dtype(transfer.dtype), device=self.device)
            for part, place in _places(transfer.parts, flat):
                mine = rows.get((part.layer, part.key))
                if mine is not None:
                    place[: mine.numel()].copy_(mine.reshape(-1))
            pending = collectives.exchange(flat, *transfer.splits(self.rank), self.groups.everyone)
            launched.append((transfer, pending))
        return launched

    def finish_rows(self, launched: list[tuple[Transfer, Pending]], scale: Callable[[Part], Tensor]) -> Named:
        """Wait for rows and return the sums of their products, of the factors that this rank is to hold.

        ``scale``: what a sum is multiplied by; it is the rows that are, which are fewer.
        """
        result: Named = {}
        for transfer, pending in launched:
            mine = [part for part in transfer.parts if part.owner == self.rank]
            received = pending.wait().view(self.world_size, -1)
            position = 0
            for part in mine:
                dim = self._factors[part.layer, part.key].dim
                rows = received[:, position : position + part.elements].reshape(-1, 1, 1, dim)
                position += part.elements
                dtype = self._dtypes[part.layer]
                rows = rows.to(dtype) * scale(part).sqrt().to(rows.device, dtype)
                result[part.layer, part.key] = gram(rows, ones=False, dtype=dtype)
        return result

    def finish_factors(self, launched: list[tuple[Transfer, Pending]], scales: Named) -> Named:
        """Wait for reductions, pass chunks on to their owners, and return the sums that this rank is to hold."""
        reduced: list[tuple[Transfer, Tensor]] = []
        moving: list[tuple[Transfer, Pending]] = []
        collects = {t.bucket: {} for t in self.program.stage("factors")}  # type: dict[int, dict[str, Transfer]]
        for transfer in self.program.stage("factors"):
            if transfer.how == "collect":
                collects[transfer.bucket][transfer.dtype] = transfer
        for transfer, pending in launched:
            flat = pending.wait()
            if transfer.how == "all-reduce":
                reduced.append((transfer, flat))
                continue
            onward = collects[transfer.bucket][transfer.dtype]
            send, receive = onward.splits(self.rank)
            chunk = flat.to(_dtype(transfer.dtype))[: sum(send)]
            moving.append((onward, collectives.exchange(chunk, send, receive, self.groups.everyone)))
        reduced += [(transfer, pending.wait()) for transfer, pending in moving]
        result: Named = {}
        for transfer, flat in reduced:
            parts = [p for p in transfer.parts if p.owner in (-1, self.rank)]
            for part, place in _places(parts, flat):
                value = self._unpack(part, place.to(self._dtypes[part.layer]))
                scale = scales.get((part.layer, part.key))
                result[part.layer, part.key] = value if scale is None else value * scale
        return result

    def _pack(self, part: Part, total: Tensor, place: Tensor) -> None:
        factor = self._factors.get((part.layer, part.key))
        if factor is not None and factor.form == "dense":
            pack_triangle(total, place.view(factor.num_blocks, -1))
        else:
            place.copy_(total.reshape(-1))

    def _unpack(self, part: Part, flat: Tensor) -> Tensor:
        factor = self._factors.get((part.layer, part.key))
        if factor is None:  # moments, [B, O, I]
            layer = next(la for la in self.plan.layers if la.name == part.layer)
            return flat.view(layer.grad_shape)
        return unpack_factor(flat, factor)

    # --- shares --------------------------------------------------------------------------------------------

    def share(self, stage: Stage, value: Callable[[Part], Tensor | None]) -> Named:
        """Send what this rank owns, receive what the others own; flat tensors, in their layers' dtype.

        An owner, too, gets back what went through the buffer: what was rounded for the wire is rounded for all.
        ``value``: of a part that this rank owns; None sends zeros.
        """
        ours = [t for t in self.program.stage(stage) if self.rank in t.group]
        dealt: list[tuple[Transfer, Pending]] = []
        for transfer in (t for t in ours if t.how == "deal"):
            flat = torch.zeros(transfer.elements(self.rank), dtype=_dtype(transfer.dtype), device=self.device)
            for part, place in _places([p for p in transfer.parts if p.owner == self.rank], flat):
                own = value(part)
                if own is not None:
                    place.copy_(own.reshape(-1))
            pending = collectives.exchange(flat, *transfer.splits(self.rank), self.groups.get(transfer.group))
            dealt.append((transfer, pending))
        gathered: list[tuple[Transfer, Pending]] = []
        for transfer, pending in dealt:
            chunk = torch.nn.functional.pad(received := pending.wait(), (0, transfer.chunk - received.numel()))
            gathered.append((transfer, collectives.all_gather(chunk, self.groups.get(transfer.group))))
        result: Named = {}
        for transfer, pending in gathered:
            for part, place in _places(transfer.parts, pending.wait()):
                result[part.layer, part.key] = place.to(self._dtypes[part.layer])
        return result

    def gather_numbers(self, values: list[float]) -> list[list[float]]:
        """Return every rank's numbers, on every rank: after loading, and at refreshes where rows may travel.

        The only collective of a step that its program does not list, since it decides on the next program.
        """
        gathered = collectives.all_gather(vector(values, self.device), self.groups.everyone).wait()
        numbers: list[list[float]] = gathered.view(self.world_size, -1).tolist()
        return numbers

    def gather_state(self, state: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Return every rank's state on rank 0, None elsewhere."""
        return agree.gather_objects(self.groups, _on_cpu(state))

    def raise_everywhere(self, error: BaseException | None) -> None:
        agree.raise_everywhere(self.groups, error, self.device)


def _on_cpu(value: Any) -> Any:
    """Return a nested dict with its tensors on the CPU: another rank may not see this one's GPU."""
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return value.cpu() if isinstance(value, Tensor) else value


def unpack_factor(flat: Tensor, factor: FactorSpec) -> Tensor:
    """Return a factor, or an inverse, from its triangle."""
    rows = flat.view(factor.num_blocks, -1)
    return rows if factor.form == "diagonal" else unpack_triangle(rows, factor.dim)


def vector(values: Sequence[Tensor | float], device: torch.device) -> Tensor:
    """Return numbers, some of which are on the device already, as one float64 tensor, without waiting for it."""
    tensors: Any = [v for v in values if isinstance(v, Tensor)]
    host = torch.tensor([0.0 if isinstance(v, Tensor) else float(v) for v in values], dtype=torch.float64)
    flat = host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
    if not tensors:
        return flat
    pieces = [
        v.to(device, torch.float64).reshape(()) if isinstance(v, Tensor) else flat[i] for i, v in enumerate(values)
    ]
    return torch.stack(pieces)


def _places(parts: Iterable[Part], flat: Tensor) -> Iterable[tuple[Part, Tensor]]:
    position = 0
    for part in parts:
        yield part, flat[position : position + part.elements]
        position += part.elements


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
