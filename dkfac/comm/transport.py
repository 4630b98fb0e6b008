"""Execute the transfers of a program: pack tensors by layer and key into flat buffers, send them, and unpack them.

Input: tensors and numbers of this rank. Output: what the program assigns to this rank. Owns: the process groups and the
buffers in flight. A single rank is a transport with an empty program.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dkfac.comm import agree, collectives, packing
from dkfac.comm.buffers import dtype_of, vector
from dkfac.comm.collectives import Pending
from dkfac.comm.groups import Groups
from dkfac.comm.packing import Layout, Named, PackedFactors, to_buffer
from dkfac.ops import triangles
from dkfac.plan.plan import Plan
from dkfac.plan.program import expand, groups_of
from dkfac.plan.spec import FactorSpec, LayerSpec
from dkfac.plan.transfer import How, Part, Stage, Transfer


class Transport:
    """Communication between ranks as planned, from the point of view of one rank."""

    def __init__(self, plan: Plan, groups: Groups, device: torch.device) -> None:
        """Creates no process group yet: ``open`` does, on all ranks."""
        self.groups, self.device = groups, device
        self.rank, self.world_size = groups.rank, groups.world_size
        self._launched: list[tuple[Transfer, Pending]] = []
        self.num_launched = 0
        """Number of buckets of this step that have been launched."""
        self._read(plan)

    def _read(self, plan: Plan) -> None:
        self.plan, self.program = plan, expand(plan, self.rank)
        self.factors: dict[tuple[str, str], FactorSpec]
        """By layer and key."""
        self.factors = {(la.name, factor.key): factor for la in plan.layers for factor in la.factors}
        holdings = {layer.name: plan.holding(layer.name, self.rank) for layer in plan.layers}
        self.held = {(name, key) for name, held in holdings.items() for key in held.running}
        """Factors, and moments, that this rank holds."""
        self.held |= {(name, "moments") for name, held in holdings.items() if held.moments}
        self.dtypes = {layer.name: dtype_of(layer.dtype) for layer in plan.layers}
        self._layouts: dict[tuple[int, bool], tuple[Transfer, Layout]] = {}
        """By transfer, which is kept so that no other one gets its id."""
        self._splits: dict[int, tuple[Transfer, tuple[list[int], list[int]]]] = {}
        """What this rank sends and receives, by transfer."""
        self.num_buckets = 1 + max((t.bucket for t in self.program.stage("factors")), default=-1)

    def open(self) -> Transport:
        """Create the process groups that the ranks' programs name, and return self. A collective."""
        self.groups.make(groups_of(self.plan))
        return self

    def follow(self, plan: Plan) -> None:
        """Execute another plan from now on. A collective."""
        self._read(plan)
        self.open()

    def close(self) -> None:
        """Destroy the process groups."""
        self.groups.close()

    def only(self, stage: Stage, kept: Container[tuple[str, str]]) -> Transport:
        """Return a copy with the same process groups that, in a stage, transfers only ``kept``, as (layer, key)."""
        found = copy.copy(self)
        found.program = self.program.only(stage, kept)
        found._launched, found._layouts, found._splits = [], {}, {}
        return found

    # --- small vectors -------------------------------------------------------------------------------------

    def sum_vector(self, stage: Stage, values: Tensor) -> Tensor:
        """Return the sum over ranks of a float64 vector."""
        for transfer in self.program.stage(stage):
            assert values.numel() == transfer.used, f"{stage}: {values.numel()} instead of {transfer.used} numbers"
            values = collectives.all_reduce(values.to(self.device).contiguous(), self.groups.everyone).wait()
        return values

    def sum(self, stage: Stage, values: Sequence[Tensor | float]) -> Tensor:
        """Return the sum over ranks of a few numbers, in float64."""
        return self.sum_vector(stage, vector(values, self.device))

    def sum_numbers(self, stage: Stage, values: list[float]) -> list[float]:
        """Return the sum over ranks of numbers on the host. Blocks until the collective has finished."""
        for _ in self.program.stage(stage):
            values = self.sum(stage, values).tolist()
        return values

    # --- factors -------------------------------------------------------------------------------------------

    def pack(self, sums: Named) -> tuple[list[PackedFactors], Named]:
        """Return sums as they are sent: factors of one shape packed together, and the rest (moments) flat."""
        return packing.pack(sums, self.factors, self.device), {
            name: total.reshape(-1).to(self.device) for name, total in sums.items() if name not in self.factors
        }

    def splits(self, transfer: Transfer) -> tuple[list[int], list[int]]:
        """Return how many elements this rank sends to each member of an all-to-all, and receives from each."""
        if id(transfer) not in self._splits:
            self._splits[id(transfer)] = transfer, transfer.splits(self.rank)
        return self._splits[id(transfer)][1]

    def layout(self, transfer: Transfer, *, own: bool = False) -> Layout:
        """Return where the parts of a reduction are; ``own``: in the buffer that this rank receives of them."""
        key = id(transfer), own
        if key not in self._layouts:
            parts = [p for p in transfer.parts if not own or p.owner in (-1, self.rank)]
            held = self.held if own else {(p.layer, p.key) for p in parts}
            layers = [layer.name for layer in self.plan.layers]
            self._layouts[key] = transfer, Layout(parts, self.factors, layers, held)
        return self._layouts[key][1]

    def launch_factors(self, bucket: int, fill: Callable[[Transfer], Tensor]) -> list[tuple[Transfer, Pending]]:
        """Launch the reductions of a bucket. ``fill``: returns the buffer of a transfer."""
        launched = []
        for transfer in self.program.stage("factors"):
            if transfer.bucket != bucket or transfer.how not in ("all-reduce", "reduce-scatter"):
                continue
            flat = fill(transfer)
            if transfer.how == "all-reduce":
                pending = collectives.all_reduce(flat, self.groups.everyone)
            else:
                wide = torch.promote_types(flat.dtype, torch.float32)
                pending = collectives.reduce_scatter(flat, self.groups.everyone, wide)
            launched.append((transfer, pending))
        return launched

    def _launch_rest(self, fill: Callable[[Transfer], Tensor]) -> list[tuple[Transfer, Pending]]:
        for bucket in range(self.num_launched, self.num_buckets):
            self._launched += self.launch_factors(bucket, fill)
        launched, self._launched, self.num_launched = self._launched, [], 0
        return launched

    def launch_rest(self, given: Named) -> list[tuple[Transfer, Pending]]:
        """Launch the reductions that have not been launched yet; return those of all buckets. ``given``: packed sums; a
        missing one counts as zero."""
        return self._launch_rest(functools.partial(self._buffer, given))

    def _buffer(self, given: Named, transfer: Transfer) -> Tensor:
        elements, dtype = transfer.elements(self.rank), dtype_of(transfer.dtype)
        return to_buffer(self.layout(transfer), given, elements, dtype, self.device)

    def launch_sums(
        self, sums: Named, correction: Tensor | float
    ) -> tuple[list[tuple[Transfer, Pending]], Tensor] | None:
        """Pack sums in one launch for each transfer, those over gradients times ``correction``, and launch all
        reductions. Also returns whether the sums are finite. None if the kernels cannot do it."""
        totals = {name: total.contiguous() for name, total in sums.items()}
        dtypes = {dtype_of(t.dtype) for t in self.program.stage("factors") if t.how in ("all-reduce", "reduce-scatter")}
        if self.num_launched or self.program.header_first or not sums or not dtypes:
            return None
        if not all(triangles.can_pack(torch.empty(0, dtype=d, device=self.device), *totals.values()) for d in dtypes):
            return None
        fine = list[Tensor]()

        def fill(transfer: Transfer) -> Tensor:
            flat = torch.empty(transfer.elements(self.rank), dtype=dtype_of(transfer.dtype), device=self.device)
            fine.append(packing.pack_at_once(self.layout(transfer), totals, correction, flat))
            return flat

        launched = self._launch_rest(fill)
        return launched, torch.stack(fine).all()

    def launch_early(self, sums: Named) -> None:
        """Launch the next bucket during forward or backward."""
        groups, rest = self.pack(sums)
        for group in groups:
            rest |= group.parts()
        self._launched += self.launch_factors(self.num_launched, functools.partial(self._buffer, rest))
        self.num_launched += 1

    def drop_launched(self) -> None:
        """Launch the remaining buckets with zeros, wait for all and discard them: the step will not be taken.

        Ranks may have launched different numbers of them.
        """
        for _, pending in self.launch_rest({}):
            pending.wait()

    def finish_factors(self, launched: list[tuple[Transfer, Pending]]) -> list[tuple[Layout, Tensor]]:
        """Wait for reductions, forward chunks to those who hold them, and return buffers with the sums that this rank
        holds."""
        reduced: list[tuple[Transfer, Tensor]] = []
        moving: list[tuple[Transfer, Pending]] = []
        onwards = {(t.bucket, t.dtype, t.how): t for t in self.program.stage("factors")}
        for transfer, pending in launched:
            flat = pending.wait()
            if transfer.how == "all-reduce":
                reduced.append((transfer, flat))
                continue
            how: How = "collect" if transfer.parts[0].owner >= 0 else "all-gather"
            onward, chunk = onwards[transfer.bucket, transfer.dtype, how], flat.to(dtype_of(transfer.dtype))
            if how == "all-gather":
                moving.append((onward, collectives.all_gather(chunk, self.groups.everyone)))
                continue
            send, receive = self.splits(onward)
            moving.append((onward, collectives.exchange(chunk[: sum(send)], send, receive, self.groups.everyone)))
        reduced += [(transfer, pending.wait()) for transfer, pending in moving]
        return [(self.layout(transfer, own=True), flat) for transfer, flat in reduced]

    # --- shares --------------------------------------------------------------------------------------------

    def share(self, stage: Stage, value: Callable[[Part], Tensor | Sequence[Tensor] | None]) -> Named:
        """Send what this rank owns, receive what the others own; return flat tensors, in their layers' dtype.

        An owner, too, gets back what went through the buffer: what is rounded for the wire is rounded on all ranks.
        ``value``: returns the tensor of a part that this rank owns, or tensors that together are it; None sends zeros.
        """
        ours = self.program.stage(stage)
        dealt: list[tuple[Transfer, Pending]] = []
        for transfer in (t for t in ours if t.how == "deal"):
            pieces = list[Tensor]()
            for part in transfer.parts:
                own = value(part) if part.owner == self.rank else ()
                own = own if own is not None else torch.zeros(part.elements, device=self.device)
                pieces += [t.reshape(-1) for t in ([own] if isinstance(own, Tensor) else own)]
            blank = torch.empty(0, dtype=dtype_of(transfer.dtype), device=self.device)
            flat = torch.cat(pieces).to(blank) if pieces else blank
            pending = collectives.exchange(flat, *self.splits(transfer), self.groups.get(transfer.group))
            dealt.append((transfer, pending))
        gathered: list[tuple[Transfer, Pending]] = []
        for transfer, pending in dealt:
            chunk = pending.wait()
            padding = transfer.chunk - len(chunk)
            chunk = torch.nn.functional.pad(chunk, (0, padding)) if padding else chunk
            gathered.append((transfer, collectives.all_gather(chunk, self.groups.get(transfer.group))))
        result: Named = {}
        for transfer, pending in gathered:
            layout, flat = self.layout(transfer), pending.wait()
            for dtype in dict.fromkeys(self.dtypes[name] for name, _ in layout.names):
                places = torch.split(flat.to(dtype), [*layout.sizes, len(flat) - layout.used])
                pairs = zip(layout.names, places, strict=False)
                result |= {name: place for name, place in pairs if self.dtypes[name[0]] == dtype}
        return result

    def check_unmoved(self, layers: Iterable[tuple[LayerSpec, torch.dtype, torch.device]]) -> None:
        """Raise if a layer was converted or moved after the plan was made. Given: its spec, and what it is now."""
        kind = self.device.type
        for spec, dtype, device in layers:
            if str(dtype) != f"torch.{spec.dtype}" or device.type != kind:
                raise RuntimeError(
                    f"layer {spec.name!r} was {spec.dtype} on {kind} when K-FAC was attached and is {dtype} on "
                    f"{device.type} now: with several ranks attach K-FAC after the model is converted and moved"
                )

    # --- not listed in any program: attaching, loading, replanning, errors -------------------------------------

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over ranks of a float64 vector, which may be overwritten."""
        return collectives.all_reduce(values, self.groups.everyone).wait()

    def gather_numbers(self, values: list[float]) -> list[list[float]]:
        """Return every rank's numbers, on every rank: after loading, and at refreshes where rows may be sent.

        The only collective of a step that its program does not list, because it decides on the next program.
        """
        gathered = collectives.all_gather(vector(values, self.device), self.groups.everyone).wait()
        numbers: list[list[float]] = gathered.view(self.world_size, -1).tolist()
        return numbers

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's dicts of tensors and plain values, on the CPU, on rank 0; None elsewhere."""
        return agree.gather_state(self.groups, value)

    def tell(self, text: str) -> str:
        """Return rank 0's text, on all ranks."""
        return agree.tell(self.groups, text, self.device)

    def broadcast(self, values: Tensor) -> Tensor:
        """Return rank 0's values, on all ranks."""
        return collectives.broadcast_from(values.contiguous(), self.groups.global_rank(0), self.groups.everyone).wait()

    def defer(self, error: BaseException) -> BaseException:
        """Return the error, of which all ranks learn in the next header or status."""
        return error

    def raise_everywhere(self, error: BaseException | None) -> None:
        """Raise one rank's error on all ranks. A collective, called once all ranks know that one failed."""
        agree.raise_everywhere(self.groups, error, self.device)
