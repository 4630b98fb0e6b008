"""Settings that cannot be combined: one table, with the reason and the remedy for each restriction.

Input: settings. Output: an error, or nothing. Owns: the table.

Checks that need more than the settings are elsewhere: names in ``skip`` and ``flattened`` need the model
(layers/find.py), ``worker_fraction`` the number of ranks (plan/make.py), ``fisher_loss`` the shape of the output
(capture/fisher.py), uneven inputs the plan (kfac.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Where = Literal["always", "without an optimizer", "with roles", "on several ranks", "with NCCL", "with shards"]


@dataclass(frozen=True, slots=True)
class Restriction:
    names: tuple[str, ...]
    """The settings involved."""
    when: Callable[[Any], bool]
    """Returns whether a ``Settings`` is refused. Its type cannot be imported here, because it calls this module."""
    message: str
    """The error message; ``{s.damping}`` is replaced by the value of a setting."""
    where: Where = "always"


def check_combinations(settings: Any, where: Where = "always") -> None:
    """Raise ValueError for the first combination of settings that the table does not allow."""
    for row in RESTRICTIONS:
        if row.where == where and row.when(settings):
            raise ValueError(row.message.format(s=settings))


def _not_with_staleness(name: str, shown: str, when: Callable[[Any], bool], *kinds: str) -> Restriction:
    """Return a restriction for ``staleness``, with which not all factors are measured and decomposed at once."""
    message = f'staleness="{{s.experimental.staleness}}" cannot be combined with {shown}: remove one of them'
    chosen = kinds or ("change", "basis")
    return Restriction(("staleness", name), lambda s: s.experimental.staleness in chosen and when(s), message)


def _needs_staleness(name: str, default: float) -> Restriction:
    message = (
        f'{name}={{s.experimental.{name}}} has no effect with staleness="fixed": use staleness="change" or "basis"'
    )
    return Restriction((name, "staleness"), lambda s: _is_unused(s.experimental, name, default), message)


def _is_unused(experimental: Any, name: str, default: float) -> bool:
    return bool(experimental.staleness == "fixed" and getattr(experimental, name) != default)


RESTRICTIONS: tuple[Restriction, ...] = (
    Restriction(
        ("inverse_interval", "factor_interval"),
        lambda s: s.inverse_interval % s.factor_interval != 0,
        "inverse_interval ({s.inverse_interval}) must be a multiple of factor_interval ({s.factor_interval}): "
        "decomposing between factor updates repeats the previous result",
    ),
    # Ranks
    Restriction(
        ("overlap", "wire_dtype"),
        lambda s: s.experimental.overlap and s.wire_dtype == "float16",
        'overlap=True with wire_dtype="float16": sums are sent before the ranks can agree on a scale, and float16 may '
        'overflow; use "bfloat16"',
    ),
    Restriction(
        ("overlap", "fisher"),
        lambda s: s.experimental.overlap and s.fisher != "empirical",
        'overlap=True has no effect with fisher="{s.fisher}", whose gradients are computed after the backward pass: '
        'omit overlap, or use fisher="empirical"',
    ),
    Restriction(
        ("wire_form", "weight_sharing", "fisher"),
        lambda s: s.experimental.wire_form == "rows" and (s.weight_sharing == "reduce" or s.fisher != "empirical"),
        'wire_form="rows" sends the rows of the training backward: it requires weight_sharing="expand" and '
        'fisher="empirical"',
    ),
    Restriction(
        ("cluster", "strategy"),
        lambda s: s.cluster is not None and s.strategy != "auto",
        'cluster={s.cluster!r} is used only by strategy="auto"; strategy is {s.strategy!r}',
    ),
    Restriction(
        ("worker_fraction", "strategy"),
        lambda s: s.worker_fraction is not None and s.strategy != "hybrid-opt",
        'worker_fraction={s.worker_fraction} is used only by strategy="hybrid-opt"; strategy is {s.strategy!r}',
    ),
    # Decompositions in the background
    Restriction(
        ("inverse_backend", "inverse_lag"),
        lambda s: s.experimental.inverse_backend != "auto" and not s.inverse_lag,
        "inverse_backend={s.experimental.inverse_backend!r} requires inverse_lag > 0: without a lag, decompositions "
        "are computed in the step",
    ),
    Restriction(
        ("inverse_lag", "inverse_interval", "warmup_refresh"),
        lambda s: s.inverse_lag > 0 and s.inverse_lag > s.shortest_interval,
        "inverse_lag={s.inverse_lag} is more than the shortest interval between refreshes, {s.shortest_interval} "
        "(inverse_interval={s.inverse_interval}, warmup_refresh={s.warmup_refresh}): refreshes would overlap",
    ),
    Restriction(
        ("inverse_lag", "spread_refresh"),
        lambda s: s.inverse_lag > 0 and s.spread_refresh > 1,
        "inverse_lag={s.inverse_lag} cannot be combined with spread_refresh={s.spread_refresh}: remove one",
    ),
    Restriction(
        ("inverse_backend", "tf32"),
        lambda s: s.experimental.inverse_backend == "stream" and s.tf32,
        'inverse_backend="stream" cannot be combined with tf32=True, which applies to the whole process: background '
        'decompositions would be rounded to TF32; use inverse_backend="threads"',
    ),
    # Intervals of each factor
    _not_with_staleness("overlap", "overlap=True", lambda s: s.experimental.overlap),
    _not_with_staleness("wire_form", 'wire_form="rows"', lambda s: s.experimental.wire_form == "rows"),
    _not_with_staleness("strategy", 'strategy="local"', lambda s: s.strategy == "local"),
    _not_with_staleness("inverse_lag", "inverse_lag={s.inverse_lag}", lambda s: s.inverse_lag > 0),
    _not_with_staleness("spread_refresh", "spread_refresh={s.spread_refresh}", lambda s: s.spread_refresh > 1),
    _not_with_staleness("cuda_graph", "cuda_graph=True", lambda s: s.cuda_graph),
    _not_with_staleness("curvature", 'curvature="ekfac"', lambda s: s.curvature == "ekfac"),
    _not_with_staleness("solver", 'solver="cholesky"', lambda s: s.solver == "cholesky", "basis"),
    _needs_staleness("staleness_threshold", 0.1),
    _needs_staleness("staleness_min_rows", 1024),
    _needs_staleness("max_interval", 200),
    # Fisher and forms of factors
    Restriction(
        ("fisher_fraction", "fisher"),
        lambda s: s.fisher_fraction != 1 and s.fisher != "sampled",
        'fisher_fraction={s.fisher_fraction} is used only by fisher="sampled"',
    ),
    Restriction(
        ("fisher", "fisher_loss"),
        lambda s: s.fisher != "empirical" and s.fisher_loss is None,
        'fisher="{s.fisher}" needs fisher_loss="cross-entropy", "bernoulli" or "mse": the distribution that the '
        "model's output predicts cannot be inferred from a backward pass",
    ),
    Restriction(
        ("flattened", "solver"),
        lambda s: s.experimental.flattened is not None and s.solver == "cholesky",
        'flattened={{...}} with solver="cholesky": damping three factors needs their eigenvalues; use "eigen" or '
        '"warm-eigen"',
    ),
    # Curvature
    Restriction(
        ("rescale", "curvature"),
        lambda s: s.curvature == "adaptive" and s.rescale != "none",
        'rescale={s.rescale!r} with curvature="adaptive": its updates have the length of the optimizer\'s own; omit '
        "rescale",
    ),
    Restriction(
        ("rescale", "curvature"),
        lambda s: s.curvature == "adam-eigen" and s.rescale not in ("none", "kl-clip"),
        'rescale={s.rescale!r} with curvature="adam-eigen": the length of the step is Adam\'s, which only "kl-clip" '
        "may shorten; omit rescale",
    ),
    Restriction(
        ("basis_dtype", "curvature"),
        lambda s: s.experimental.basis_dtype != "float32" and s.curvature in ("kfac", "ekfac"),
        'basis_dtype={s.experimental.basis_dtype!r} requires curvature="adaptive" or "adam-eigen": dividing by small '
        "eigenvalues would amplify the rounding errors of the basis",
    ),
    Restriction(
        ("cuda_graph", "rescale", "curvature"),
        lambda s: s.cuda_graph and (s.curvature == "ekfac" or (s.rescale == "kl-clip" and s.curvature == "kfac")),
        'cuda_graph=True requires rescale="norm", "norm-global", "norm-kl" or "none" and curvature="adaptive", "kfac" '
        'or "adam-eigen", not {s.rescale!r} and {s.curvature!r}: their inputs change from step to step',
    ),
    Restriction(
        ("curvature", "solver"),
        lambda s: s.curvature in ("ekfac", "adam-eigen", "adaptive") and s.solver == "cholesky",
        'curvature="{s.curvature}" needs eigenbases, which solver="cholesky" does not compute; use solver="eigen" or '
        '"warm-eigen"',
    ),
    # Restrictions that depend on other arguments of KFAC
    Restriction(
        ("share",),
        lambda s: s.share == "weights",
        'share="weights" sends weights after the optimizer\'s step: use KFAC(model, optimizer)',
        "without an optimizer",
    ),
    Restriction(
        ("share", "curvature", "fisher", "staleness", "strategy", "spread_refresh"),
        lambda s: s.share == "weights" or s.curvature == "ekfac" or s.fisher != "empirical"
        or s.experimental.staleness != "fixed" or s.strategy not in ("auto", "replicated") or s.spread_refresh > 1,
        'roles require curvature="adaptive", "adam-eigen" or "kfac", fisher="empirical", share="gradients" and '
        'staleness="fixed", without strategy and spread_refresh: helpers measure and decompose',
        "with roles",
    ),
    Restriction(
        ("staleness",),
        lambda s: s.experimental.staleness == "change",
        'staleness="change" on several ranks: what is noise is estimated from halves of each rank\'s examples, so the '
        'intervals would depend on the number of ranks; use "fixed" or "basis"',
        "on several ranks",
    ),
    Restriction(
        ("overlap",),
        lambda s: s.experimental.overlap,
        "overlap=True with NCCL: collectives would be launched from autograd's threads while DDP's reductions are "
        "outstanding on another communicator, in an order that may differ between ranks, which may hang: omit overlap",
        "with NCCL",
    ),
    Restriction(
        ("share", "overlap", "staleness", "wire_form", "fisher"),
        lambda s: s.share == "weights" or s.experimental.overlap or s.experimental.staleness != "fixed"
        or s.experimental.wire_form == "rows" or s.fisher != "empirical",
        'parameters that are split over ranks require share="gradients", overlap=False, staleness="fixed", '
        'wire_form="sums" and fisher="empirical": omit these settings',
        "with shards",
    ),
)  # fmt: skip
