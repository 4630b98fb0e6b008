"""A plan: which ranks measure, hold, decompose and precondition each layer.

Input: placements of layers. Output: what each rank holds; JSON. Owns: nothing; plain frozen data, equal on every rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from dkfac.plan.shards import ShardedParameter, Sharding
from dkfac.plan.sharing import per_rank
from dkfac.plan.spec import FactorSpec, LayerSpec, Ranks

PLAN_VERSION = 2


@dataclass(frozen=True, slots=True)
class Placement:
    """Who does what for one layer; ``factors`` and ``decomposed_by`` are in the order of the layer's factors."""

    statistics: Ranks
    """Ranks whose batches measure the layer."""
    factors: tuple[Ranks, ...]
    """Ranks that hold each running factor."""
    decomposed_by: tuple[Ranks, ...]
    preconditioned_by: Ranks
    """Ranks that hold the decompositions and precondition the gradient."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank holds of a layer."""

    running: frozenset[str]
    decompositions: frozenset[str]
    moments: bool
    adam: bool = False
    """Whether it steps the layer with Adam in the eigenbasis."""


@dataclass(frozen=True, slots=True)
class Plan:
    strategy: str
    world_size: int
    layers: tuple[LayerSpec, ...]
    placements: tuple[Placement, ...]
    buckets: tuple[tuple[tuple[str, str], ...], ...] = ()
    """Factors that are reduced together, as ``(layer, key)``, in launch order."""
    wire_dtype: str | None = None
    """Dtype of factors and gradients in transfers; None: their own."""
    solver: str = "eigen"
    moments: bool = False
    """Whether EKFAC's moments are measured and reduced."""
    share: str = "gradients"
    rows: tuple[tuple[str, str, int], ...] = ()
    """Factors for which each rank sends at most this many rows instead of their sum, as ``(layer, key, rows)``."""
    adaptive: bool = False
    """Whether each factor has its own interval, adapted to its change, which ranks exchange."""
    num_compared: int = 0
    """How many parameters ranks that train replicas of a model compare at refreshes; 0: they compare nothing."""
    loopback: bool = False
    """Whether one rank sends to itself what several send to each other, so that a benchmark on one GPU takes their
    path."""
    sharding: Sharding | None = None
    """How parameters are split over ranks; None: every rank has all of them."""

    _by_name: dict[str, tuple[LayerSpec, Placement]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        both = tuple(zip(self.layers, self.placements, strict=True))
        object.__setattr__(self, "_by_name", {layer.name: (layer, placement) for layer, placement in both})
        everyone = tuple(range(self.world_size))
        sets = {id(ranks): ranks for _, p in both for ranks in _named(p)}
        wrong = {key for key, ranks in sets.items() if not _are_ranks(ranks, self.world_size)}
        for layer, placement in both:
            self._check(layer, placement, everyone, wrong)
        wanted = {(layer.name, factor.key) for layer in self.layers for factor in layer.factors}
        listed = [item for bucket in self.buckets for item in bucket]
        if sorted(listed) != sorted(wanted):
            raise ValueError(f"the buckets of plan {self.strategy!r} must list each factor once")

    def _check(self, layer: LayerSpec, placement: Placement, everyone: Ranks, wrong: set[int]) -> None:
        """``wrong``: ids of the sets that are not sorted ranks; checked once, however many layers share one."""
        for ranks in _named(placement):
            if id(ranks) in wrong:
                raise ValueError(f"layer {layer.name!r}: {ranks} are not sorted ranks of a world of {self.world_size}")
        for factor, held, by in zip(layer.factors, placement.factors, placement.decomposed_by, strict=True):
            if not set(by) <= set(held):
                raise ValueError(f"layer {layer.name!r}: ranks {by} decompose {factor.key} but only {held} hold it")
            if len(held) > 1 and held != placement.statistics:
                raise ValueError(f"layer {layer.name!r}: {factor.key} is held by {held}: one rank, or all that measure")
        if placement.statistics != everyone and any(held != placement.statistics for held in placement.factors):
            raise ValueError(f"layer {layer.name!r}: who measures alone ({placement.statistics}) holds the factors")
        if self.world_size % len(placement.preconditioned_by):
            raise ValueError(
                f"layer {layer.name!r}: {len(placement.preconditioned_by)} workers cannot serve equal parts"
            )
        sharding, number = self.sharding, len(placement.preconditioned_by)
        size = self.world_size // number
        if sharding and (size < min(2, self.world_size) or any(
            not set(sharding.replica_of(worker)) <= set(group) for worker, group in self.served(placement)
        )):  # fmt: skip
            raise ValueError(
                f"strategy={self.strategy!r} has {number} ranks that precondition layer {layer.name!r}; its parameters "
                f"are sharded over {len(sharding.mesh[0])} ranks, and there are not shards for each of them: use "
                f'strategy="sharded" or "mem-opt"'
            )

    def served(self, placement: Placement, rank: int | None = None) -> Iterator[tuple[int, Ranks]]:
        """Yield the ranks that precondition a layer, each with the range of consecutive ranks that it serves; with
        ``rank``, only the one that serves it."""
        workers = placement.preconditioned_by
        size = self.world_size // len(workers)
        for i in range(len(workers)) if rank is None else (rank // size,):
            group = tuple(range(i * size, (i + 1) * size))
            assert workers[i] in group, f"rank {workers[i]} is not among the ranks it serves"
            yield workers[i], group

    @property
    def shares_no_updates(self) -> bool:
        """Whether every rank preconditions every layer, and has all of its gradient."""
        return self.sharding is None and all(
            len(placement.preconditioned_by) == self.world_size for placement in self.placements
        )

    def is_summed(self, placement: Placement) -> bool:
        """Whether a layer's statistics are summed over ranks."""
        return self.loopback or len(placement.statistics) > 1

    def placement(self, name: str) -> Placement:
        return self._by_name[name][1]

    def holding(self, name: str, rank: int) -> Holding:
        """Return what a rank holds of a layer. EKFAC measures moments in eigenbases, so ranks that measure hold those
        too."""
        layer, placement = self._by_name[name]
        keys = [factor.key for factor in layer.factors]
        moments = self.moments and layer.has_moments
        uses = rank in placement.preconditioned_by or (moments and rank in placement.statistics)
        by = zip(keys, placement.decomposed_by, strict=True)
        return Holding(
            running=frozenset(k for k, ranks in zip(keys, placement.factors, strict=True) if rank in ranks),
            decompositions=frozenset(k for k, ranks in by if uses or rank in ranks),
            moments=moments and rank in placement.preconditioned_by,
        )

    def to_json(self) -> str:
        """Return the plan as JSON; equal sets of ranks are written once."""
        groups: dict[Ranks, int] = {}

        def number(ranks: Ranks) -> int:
            return groups.setdefault(ranks, len(groups))

        placements = [
            {
                "statistics": number(p.statistics),
                "factors": [number(ranks) for ranks in p.factors],
                "decomposed_by": [number(ranks) for ranks in p.decomposed_by],
                "preconditioned_by": number(p.preconditioned_by),
            }
            for p in self.placements
        ]
        everyone = tuple(range(self.world_size))
        body = {
            "version": PLAN_VERSION,
            "strategy": self.strategy,
            "world_size": self.world_size,
            "wire_dtype": self.wire_dtype,
            "solver": self.solver,
            "moments": self.moments,
            "share": self.share,
            "rows": self.rows,
            "adaptive": self.adaptive,
            "num_compared": self.num_compared,
            "layers": [asdict(layer) for layer in self.layers],
            "placements": placements,
            "buckets": self.buckets,
            "groups": ["all" if ranks == everyone else ranks for ranks in groups],
        } | ({} if self.sharding is None else {"sharding": asdict(self.sharding)})
        return json.dumps(body, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that ``to_json`` wrote."""
        body = json.loads(text)
        if body.get("version") != PLAN_VERSION:
            raise ValueError(f"the plan has version {body.get('version')!r}; this dkfac reads version {PLAN_VERSION}")
        everyone = tuple(range(body["world_size"]))
        groups = [everyone if ranks == "all" else tuple(ranks) for ranks in body["groups"]]
        return cls(
            strategy=body["strategy"],
            world_size=body["world_size"],
            layers=tuple(_layer(layer) for layer in body["layers"]),
            placements=tuple(
                Placement(
                    groups[p["statistics"]],
                    tuple(groups[i] for i in p["factors"]),
                    tuple(groups[i] for i in p["decomposed_by"]),
                    groups[p["preconditioned_by"]],
                )
                for p in body["placements"]
            ),
            buckets=tuple(tuple((name, key) for name, key in bucket) for bucket in body["buckets"]),
            wire_dtype=body["wire_dtype"],
            solver=body["solver"],
            moments=body["moments"],
            share=body["share"],
            rows=tuple((name, key, number) for name, key, number in body["rows"]),
            adaptive=body.get("adaptive", False),
            num_compared=body.get("num_compared", 0),
            sharding=_sharding(body.get("sharding")),
        )

    def fingerprint(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def memory_bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes of running factors and of decompositions that a rank holds between steps."""
        factors = decompositions = 0
        for layer in self.layers:
            size, holding = _BYTES[layer.dtype], self.holding(layer.name, rank)
            for factor in layer.factors:
                factors += size * factor.num_elements * (factor.key in holding.running)
                elements = factor.eigen_elements if self.solver != "cholesky" else factor.num_elements
                decompositions += size * elements * (factor.key in holding.decompositions)
        return {"factors": factors, "decompositions": decompositions}

    def bytes_by_rank(self) -> list[int]:
        """Return the bytes that each rank holds between steps."""
        both = zip(self.layers, self.placements, strict=True)
        shares = (part for layer, placement in both for part in self.parts(layer, placement))
        return [int(held) for held in per_rank(shares, self.world_size)]

    def parts(self, layer: LayerSpec, placement: Placement) -> Iterator[tuple[Ranks, int]]:
        """Yield what is held of a layer between steps: the ranks that hold it, and its bytes."""
        size = _BYTES[layer.dtype]
        users = placement.preconditioned_by
        if self.moments and layer.has_moments:
            users = tuple(sorted({*users, *placement.statistics}))
        for factor, held, by in zip(layer.factors, placement.factors, placement.decomposed_by, strict=True):
            yield held, size * factor.num_elements
            elements = factor.eigen_elements if self.solver != "cholesky" else factor.num_elements
            yield users if set(by) <= set(users) else tuple(sorted({*users, *by})), size * elements


def _named(placement: Placement) -> tuple[Ranks, ...]:
    return placement.statistics, placement.preconditioned_by, *placement.factors, *placement.decomposed_by


def _are_ranks(ranks: Ranks, world_size: int) -> bool:
    return bool(ranks) and list(ranks) == sorted(set(ranks)) and ranks[0] >= 0 and ranks[-1] < world_size


_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8}


def num_bytes(dtype: str) -> int:
    return _BYTES[dtype]


def gradient_dtype(wire_dtype: str) -> str:
    """Return the dtype in which gradients are sent: they have no agreed scale, so the range of float16 is too small."""
    return "bfloat16" if wire_dtype == "float16" else wire_dtype


def _layer(body: dict[str, Any]) -> LayerSpec:
    factors = tuple(FactorSpec(**factor) for factor in body["factors"])
    return LayerSpec(**{**body, "factors": factors})


def _sharding(body: dict[str, Any] | None) -> Sharding | None:
    if body is None:
        return None
    mesh = tuple(tuple(ranks) for ranks in body["mesh"])
    parameters = [
        {**each, "shape": tuple(each["shape"]), "cuts": tuple(map(tuple, each["cuts"]))} for each in body["parameters"]
    ]
    return Sharding(mesh, tuple(ShardedParameter(**each) for each in parameters))
