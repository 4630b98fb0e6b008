"""Which settings do not go together: one table, a row for each restriction with its reason and the remedy.

In: settings. Out: an error, or nothing. Owns nothing and writes nothing.

What is refused elsewhere needs more than the settings: names in ``skip`` and ``flattened`` need the model
(layers/find.py), ``worker_fraction`` the number of ranks (plan/make.py), ``fisher_loss`` the shape of the output
(capture/fisher.py), uneven inputs the plan (kfac.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Where = Literal["always", "without an optimizer", "with roles"]


@dataclass(frozen=True, slots=True)
class Restriction:
    names: tuple[str, ...]
    """The settings concerned."""
    when: Callable[[Any], bool]
    """Whether settings are refused. They are a ``Settings``, which checks itself and so cannot be imported here."""
    message: str
    """What is said; ``{s.damping}`` is the value of a setting."""
    where: Where = "always"


def check_combinations(settings: Any, where: Where = "always") -> None:
    """Refuse the first combination of settings that the table refuses."""
    for row in RESTRICTIONS:
        if row.where == where and row.when(settings):
            raise ValueError(row.message.format(s=settings))


def _not_with_staleness(name: str, shown: str, when: Callable[[Any], bool], *kinds: str) -> Restriction:
    """With ``staleness`` factors are measured, and decomposed, not all at once."""
    message = f'staleness="{{s.experimental.staleness}}" does not go with {shown}: leave one of them out'
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
        'overlap=True with wire_dtype="float16": sums leave before all ranks know how large they are, and float16 has '
        'little range; use "bfloat16"',
    ),
    Restriction(
        ("overlap", "fisher"),
        lambda s: s.experimental.overlap and s.fisher != "empirical",
        'overlap=True has no effect with fisher="{s.fisher}", whose gradients come after the backward pass: leave '
        'overlap out, or use fisher="empirical"',
    ),
    Restriction(
        ("wire_form", "weight_sharing", "fisher"),
        lambda s: s.experimental.wire_form == "rows" and (s.weight_sharing == "reduce" or s.fisher != "empirical"),
        'wire_form="rows" sends the rows of the training backward: it goes with weight_sharing="expand" and '
        'fisher="empirical"',
    ),
    Restriction(
        ("cluster", "strategy"),
        lambda s: s.cluster is not None and s.strategy != "auto",
        'cluster={s.cluster!r} is what strategy="auto" chooses by; strategy is {s.strategy!r}',
    ),
    Restriction(
        ("worker_fraction", "strategy"),
        lambda s: s.worker_fraction is not None and s.strategy != "hybrid-opt",
        'worker_fraction={s.worker_fraction} is used by strategy="hybrid-opt" alone; strategy is {s.strategy!r}',
    ),
    # Decompositions beside the steps
    Restriction(
        ("inverse_backend", "inverse_lag"),
        lambda s: s.experimental.inverse_backend != "auto" and not s.inverse_lag,
        "inverse_backend={s.experimental.inverse_backend!r} is for inverse_lag > 0: without a lag, work is in the step",
    ),
    Restriction(
        ("inverse_lag", "inverse_interval", "warmup_refresh"),
        lambda s: s.inverse_lag > 0 and s.inverse_lag > s.shortest_interval,
        "inverse_lag={s.inverse_lag} is more than the shortest interval between refreshes, {s.shortest_interval} "
        "(inverse_interval={s.inverse_interval}, warmup_refresh={s.warmup_refresh}): results would overtake each other",
    ),
    Restriction(
        ("inverse_lag", "spread_refresh"),
        lambda s: s.inverse_lag > 0 and s.spread_refresh > 1,
        "inverse_lag={s.inverse_lag} does not go with spread_refresh={s.spread_refresh}: leave one out",
    ),
    Restriction(
        ("inverse_backend", "tf32"),
        lambda s: s.experimental.inverse_backend == "stream" and s.tf32,
        'inverse_backend="stream" does not go with tf32=True, whose switch is the process\'s: what is decomposed '
        'beside a step would be rounded with it; use inverse_backend="threads"',
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
        'fisher_fraction={s.fisher_fraction} is used by fisher="sampled" alone',
    ),
    Restriction(
        ("fisher", "fisher_loss"),
        lambda s: s.fisher != "empirical" and s.fisher_loss is None,
        'fisher="{s.fisher}" needs fisher_loss="cross-entropy", "bernoulli" or "mse": what the model\'s output '
        "predicts cannot be read off a backward pass",
    ),
    Restriction(
        ("flattened", "solver"),
        lambda s: s.experimental.flattened is not None and s.solver == "cholesky",
        'flattened={{...}} with solver="cholesky": three factors are damped by their eigenvalues; use "eigen" or '
        '"warm-eigen"',
    ),
    # Curvature
    Restriction(
        ("rescale", "curvature"),
        lambda s: s.curvature == "adaptive" and s.rescale != "none",
        'rescale={s.rescale!r} with curvature="adaptive", whose steps have the length of the optimizer\'s own; leave '
        "rescale out",
    ),
    Restriction(
        ("rescale", "curvature"),
        lambda s: s.curvature == "adam-eigen" and s.rescale not in ("none", "kl-clip"),
        'rescale={s.rescale!r} with curvature="adam-eigen": the length of the step is Adam\'s, at most held back by '
        '"kl-clip"; leave rescale out',
    ),
    Restriction(
        ("basis_dtype", "curvature"),
        lambda s: s.experimental.basis_dtype != "float32" and s.curvature in ("kfac", "ekfac"),
        'basis_dtype={s.experimental.basis_dtype!r} goes with curvature="adaptive" or "adam-eigen": where gradients '
        "are divided by small eigenvalues, what is rounded in a basis is divided with them",
    ),
    Restriction(
        ("cuda_graph", "rescale", "curvature"),
        lambda s: s.cuda_graph and (s.curvature == "ekfac" or (s.rescale == "kl-clip" and s.curvature == "kfac")),
        'cuda_graph=True goes with rescale="norm", "norm-global", "norm-kl" or "none" and curvature="adaptive", "kfac" '
        'or "adam-eigen", not with {s.rescale!r} and {s.curvature!r}: what the others use is not the same from step to '
        "step",
    ),
    Restriction(
        ("curvature", "solver"),
        lambda s: s.curvature in ("ekfac", "adam-eigen", "adaptive") and s.solver == "cholesky",
        'curvature="{s.curvature}" lives in eigenbases, which solver="cholesky" does not compute; use solver="eigen" '
        'or "warm-eigen"',
    ),
    # With what KFAC is given beside settings
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
        'roles go with curvature="adaptive", "adam-eigen" or "kfac", fisher="empirical", share="gradients", '
        'staleness="fixed", and need no strategy or spread_refresh: helpers measure and decompose',
        "with roles",
    ),
)  # fmt: skip
