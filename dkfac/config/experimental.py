"""Settings whose benefit this project's studies could not show: ``KFAC(..., experimental={"staleness": "change"})``.

Input: options by name. Output: a frozen ``ExperimentalSettings``, or an error. Owns: nothing. They may change without
notice. The class is also in :mod:`dkfac.experimental.settings`; ``Settings``, which imports no torch, contains one.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from dkfac.config import convert, row

BasisDtype = Literal["float32", "bfloat16"]
WireForm = Literal["sums", "rows"]
Fusion = Literal["one", "optimal", "spd"]
InverseBackend = Literal["auto", "stream", "threads", "inline"]
StalenessMode = Literal["fixed", "change", "basis"]
JointNormForm = Literal["full", "diagonal"]


@row.prepared_by(row.converted)
@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentalSettings:
    # fmt: off
    staleness: StalenessMode = row.choice(
        "fixed", StalenessMode, "experimental",
        '`"change"`: each factor has its own interval for measuring and decomposing, which grows while the batch '
        'factors of consecutive refreshes are similar and shrinks when they are not. `"basis"`: the interval grows '
        "while the running factor is nearly diagonal in its last eigenbasis.",
        "it determines when statistics are refreshed")
    staleness_threshold: float = row.numeric(
        0.1, "experimental", "`staleness`: relative change up to which a factor counts as unchanged.",
        "at 0, every factor would count as changed", low=0, open_low=True)
    staleness_min_rows: int = row.integer(
        1024, 1, "experimental",
        "`staleness`: minimum rows that a refresh of a factor measures, over several steps if needed: few are noisy.",
        "it counts examples or positions")
    max_interval: int = row.integer(
        200, 1, "experimental", "`staleness`: the longest interval of a factor.", "it counts steps")
    basis_dtype: BasisDtype = row.choice(
        "float32", BasisDtype, "experimental",
        '`"bfloat16"` stores eigenbases in half the memory, except for float64 models; not with `curvature="kfac"`.',
        "eigenbases are stored in it")
    inverse_backend: InverseBackend = row.choice(
        "auto", InverseBackend, "experimental",
        "`inverse_lag`: where decompositions are computed: on a separate CUDA stream, on CPU threads or, for "
        'comparison, in the step itself. `"auto"`: a stream on a GPU if TF32 is off, CPU threads otherwise.',
        "it determines where decompositions are computed")
    replicate_factors: bool = row.flag(
        False, "experimental",
        "Store running factors on every rank, as the papers do, instead of only where they are decomposed.")
    wire_form: WireForm = row.choice(
        "sums", WireForm, "experimental",
        '`"rows"`: if a rank has fewer rows of a Linear layer than half the dimension of a factor (small batches, wide '
        "layers), it sends the rows instead of the sum of their outer products.",
        "it determines how a factor is sent")
    overlap: bool = row.flag(
        False, "experimental",
        "Reduce factors during forward and backward instead of after them; results are the same.")
    fusion: Fusion | None = row.choice(
        None, Fusion, "experimental",
        'Which factors share one reduction: all (`"one"`), the buckets with the lowest estimated cost (`"optimal"`), '
        'or the buckets of SPD-KFAC\'s rule (`"spd"`). None: `"one"`, or `"optimal"` with `overlap`.',
        "it determines which factors share one reduction", optional=True)
    replicas_may_differ: bool = row.flag(
        False, "experimental",
        "Ranks do not compare weights, gradients and learning rates: for training in which the replicas of a model are "
        "not kept the same, like local SGD.")
    norm_form: JointNormForm | None = row.choice(
        None, JointNormForm, "experimental",
        'Curvature of norm layers, instead of the setting `norm_form`: one matrix for all channels (`"full"`), or its '
        '`"diagonal"`.',
        "it determines the curvature of norm layers", optional=True)
    flattened: Mapping[str, int] | None = row.other(
        None, "experimental",
        "Names of Linear layers on flattened feature maps with their channels; overrides the setting `flattened`.",
        "A is factored by channels and positions", optional=True, accepts=convert.are_channels,
        words="a mapping from layer names to numbers of channels >= 2")
    # fmt: on

    def __post_init__(self) -> None:
        row.check_rows(self)


EXPERIMENTAL_NAMES = tuple(field.name for field in fields(ExperimentalSettings))


def as_experimental(value: Any) -> Any:
    """Return a mapping converted to ``ExperimentalSettings``; other values unchanged."""
    if not isinstance(value, Mapping):
        return value
    unknown = [name for name in value if name not in EXPERIMENTAL_NAMES]
    if unknown:
        raise TypeError(
            f"experimental={{{unknown[0]!r}: ...}}: there is no such setting; there are {', '.join(EXPERIMENTAL_NAMES)}"
        )
    return ExperimentalSettings(**value)


def move_old_keywords(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with former settings moved to ``experimental``, with a FutureWarning."""
    moved = {name: value for name, value in options.items() if is_old(name, value)}
    if not moved:
        return dict(options)
    names = ", ".join(repr(name) for name in moved)
    warnings.warn(
        f"settings {names} are experimental: use experimental={moved!r} (--set experimental.NAME=VALUE); the old "
        f"keywords will be removed in the next release",
        FutureWarning,
        stacklevel=4,
    )
    given = options.get("experimental", {})
    kept = {name: value for name, value in options.items() if name not in moved}
    if isinstance(given, ExperimentalSettings):
        return kept | {"experimental": replace(given, **moved)}
    twice = [name for name in moved if name in given]
    if twice:
        raise ValueError(f"{twice[0]} is given twice, by name and in experimental={given!r}: remove one")
    return kept | {"experimental": {**given, **moved}}


def is_old(name: str, value: Any) -> bool:
    """Return whether an option is an experimental setting; ``norm_form`` and ``flattened`` are for some values only."""
    if name == "norm_form":
        return value in ("full", "diagonal")
    if name == "flattened":
        return isinstance(value, Mapping)
    return name in EXPERIMENTAL_NAMES
