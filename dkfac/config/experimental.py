"""Settings that the studies of this project could not show to pay: ``KFAC(..., experimental={"staleness": "change"})``.

They may change or go without notice. The class is also :class:`dkfac.experimental.settings.ExperimentalSettings`; it is
defined here because ``Settings`` holds one and imports no torch.
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
        '`"change"`: each factor is measured and decomposed at intervals of its own, instead of those of the settings, '
        'which grow while the batch factors of refreshes are alike and shrink when they are not. `"basis"`: while the '
        "running factor is near diagonal in the last bases.",
        "it decides when statistics are refreshed")
    staleness_threshold: float = row.numeric(
        0.1, "experimental", "`staleness`: relative change up to which a factor counts as unchanged.",
        "at 0 nothing is ever what it was", low=0, open_low=True)
    staleness_min_rows: int = row.integer(
        1024, 1, "experimental",
        "`staleness`: rows that a refresh of a factor measures, over several steps if need be: a few rows are noise.",
        "it counts examples or positions")
    max_interval: int = row.integer(
        200, 1, "experimental", "`staleness`: the longest interval of a factor.", "it counts steps")
    basis_dtype: BasisDtype = row.choice(
        "float32", BasisDtype, "experimental",
        '`"bfloat16"` keeps eigenbases in half the memory, except for float64 models; not with `curvature="kfac"`.',
        "eigenbases are kept in it")
    inverse_backend: InverseBackend = row.choice(
        "auto", InverseBackend, "experimental",
        "`inverse_lag`: where decompositions are computed: on a stream of their own, on CPU threads, or, to compare "
        'with, in the step itself. `"auto"`: a stream on a GPU where nothing rounds its products to TF32, CPU threads '
        "elsewhere.",
        "it decides where decompositions are computed")
    replicate_factors: bool = row.flag(
        False, "experimental",
        "Keep running factors on every rank, as the papers do, instead of where they are decomposed.")
    wire_form: WireForm = row.choice(
        "sums", WireForm, "experimental",
        '`"rows"`: where the rows of a Linear layer on a rank are fewer than half the dimension of a factor (small '
        "batches, wide layers), they travel instead of the sum of their products.",
        "it decides what travels of a factor")
    overlap: bool = row.flag(
        False, "experimental",
        "Reduce factors during forward and backward instead of after them; the numbers are the same.")
    fusion: Fusion | None = row.choice(
        None, Fusion, "experimental",
        'Which factors are reduced together: all (`"one"`), as soon as it pays (`"optimal"`), or by the rule of '
        "SPD-KFAC. None: all, or, with `overlap`, as soon as it pays.",
        "it decides which factors are reduced together", optional=True)
    norm_form: JointNormForm | None = row.choice(
        None, JointNormForm, "experimental",
        'Curvature of norm layers, instead of the setting `norm_form`: all channels together (`"full"`), or '
        '`"diagonal"`.',
        "it decides the curvature of norm layers", optional=True)
    flattened: Mapping[str, int] | None = row.other(
        None, "experimental",
        "Linear layers on flattened maps, by name, with the number of channels, instead of the setting `flattened`.",
        "A is factored by channels and positions", optional=True, accepts=convert.are_channels,
        words="a mapping from layers to channels, 2 or more")
    # fmt: on

    def __post_init__(self) -> None:
        row.check_rows(self)


EXPERIMENTAL_NAMES = tuple(field.name for field in fields(ExperimentalSettings))


def as_experimental(value: Any) -> Any:
    """Return the settings of a mapping as one object."""
    if not isinstance(value, Mapping):
        return value
    unknown = [name for name in value if name not in EXPERIMENTAL_NAMES]
    if unknown:
        raise TypeError(
            f"experimental={{{unknown[0]!r}: ...}}: there is no such setting; there are {', '.join(EXPERIMENTAL_NAMES)}"
        )
    return ExperimentalSettings(**value)


def move_old_keywords(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with those that used to be settings of their own moved to ``experimental``, with a warning."""
    moved = {name: value for name, value in options.items() if is_old(name, value)}
    if not moved:
        return dict(options)
    names = ", ".join(repr(name) for name in moved)
    warnings.warn(
        f"settings {names} are experimental: use experimental={moved!r} (--set experimental.NAME=VALUE); the old "
        f"keywords will go in the next release",
        FutureWarning,
        stacklevel=4,
    )
    given = options.get("experimental", {})
    kept = {name: value for name, value in options.items() if name not in moved}
    if isinstance(given, ExperimentalSettings):
        return kept | {"experimental": replace(given, **moved)}
    twice = [name for name in moved if name in given]
    if twice:
        raise ValueError(f"{twice[0]} is given twice, by name and in experimental={given!r}: leave one out")
    return kept | {"experimental": {**given, **moved}}


def is_old(name: str, value: Any) -> bool:
    """Whether an option is an experimental setting given by name; ``norm_form`` and ``flattened`` are by value."""
    if name == "norm_form":
        return value in ("full", "diagonal")
    if name == "flattened":
        return isinstance(value, Mapping)
    return name in EXPERIMENTAL_NAMES
