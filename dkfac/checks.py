"""Which settings go together, and what is said where they do not."""

from __future__ import annotations

import itertools
import math
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dkfac.settings import Settings


RANGES: tuple[tuple[str, float, float, bool, str], ...] = (
    ("damping", 0.0, math.inf, False, "negative damping makes the curvature indefinite"),
    ("norm_damping", 0.0, math.inf, False, "negative damping makes the curvature indefinite"),
    ("factor_decay", 0.0, 1.0, False, "at 1 the first batch would never be forgotten and no later one averaged in"),
    ("staleness_threshold", 0.0, math.inf, True, "at 0 nothing is ever what it was"),
    ("kl_clip", 0.0, math.inf, True, "at 0 every update would be zero"),
)
INTEGERS: tuple[tuple[str, int, str], ...] = (
    ("factor_interval", 1, "it counts optimizer steps"),
    ("inverse_interval", 1, "it counts optimizer steps"),
    ("batch_dim", 0, "it is a dimension of the model's first input, counted from the front"),
    ("max_dim", 1, "no factor could be formed"),
    ("split_dim", 1, "it is the size of a matrix; None leaves factors whole"),
    ("split_warmup", 0, "it counts steps"),
    ("spread_refresh", 1, "it counts steps"),
    ("inverse_lag", 0, "it counts steps"),
    ("staleness_min_rows", 1, "it counts examples or positions"),
    ("max_interval", 1, "it counts steps"),
    ("max_failures", 1, "it counts failed decompositions in a row"),
)


def bad(name: str, value: object, allowed: str, consequence: str) -> ValueError:
    tail = f": {consequence}" if consequence else ""
    return ValueError(f"{name}={value!r} is not {allowed}{tail}")


def check_rhythm(settings: Settings) -> None:
    if settings.inverse_interval % settings.factor_interval:
        raise ValueError(
            f"inverse_interval ({settings.inverse_interval}) must be a multiple of factor_interval "
            f"({settings.factor_interval}): decomposing between factor updates repeats the previous result"
        )
    warmup: Any = settings.warmup_refresh
    if warmup is None:
        return
    if isinstance(warmup, Real) and not isinstance(warmup, bool) and 1.01 <= float(warmup) < math.inf:
        object.__setattr__(settings, "warmup_refresh", float(warmup))
        return
    whole = isinstance(warmup, (tuple, list)) and len(warmup) == 2
    if not whole or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in warmup):
        allowed = "a number >= 1.01, (every, until), integers >= 1, or None"
        raise bad("warmup_refresh", warmup, allowed, "early steps use it as a rhythm")
    object.__setattr__(settings, "warmup_refresh", tuple(warmup))


def _check_lag(settings: Settings) -> None:
    lag = settings.inverse_lag
    if settings.inverse_backend != "auto" and not lag:
        raise ValueError(
            f"inverse_backend={settings.inverse_backend!r} is for inverse_lag > 0: without a lag, work is in the step"
        )
    if not lag:
        return
    steps = [n for n in range(settings.early_steps + 2 * settings.inverse_interval + 1) if settings.rhythm(n)[1]]
    shortest = min(b - a for a, b in itertools.pairwise(steps))
    if lag > shortest:
        raise ValueError(
            f"inverse_lag={lag} is more than the shortest interval between refreshes, {shortest} (inverse_interval="
            f"{settings.inverse_interval}, warmup_refresh={settings.warmup_refresh}): results would overtake each other"
        )
    if settings.spread_refresh > 1 or settings.split_warmup:
        other = "spread_refresh" if settings.spread_refresh > 1 else "split_warmup"
        raise ValueError(f"inverse_lag={lag} does not go with {other}={getattr(settings, other)}: leave one out")
    if settings.inverse_backend == "stream" and settings.tf32:
        raise ValueError(
            'inverse_backend="stream" does not go with tf32=True, whose switch is the process\'s: what is decomposed '
            'beside a step would be rounded with it; use inverse_backend="threads"'
        )


def _check_staleness(settings: Settings) -> None:
    """Refuse what takes factors to be measured, or decomposed, all at once."""
    if callable(settings.staleness_threshold):
        raise bad("staleness_threshold", settings.staleness_threshold, "a number > 0", "it is the same at all steps")
    if settings.staleness == "fixed":
        return
    others: dict[str, bool] = {
        "overlap=True": settings.overlap,
        'wire_form="rows"': settings.wire_form == "rows",
        'strategy="local"': settings.strategy == "local",
        f"inverse_lag={settings.inverse_lag}": settings.inverse_lag > 0,
        f"spread_refresh={settings.spread_refresh}": settings.spread_refresh > 1,
        "cuda_graph=True": settings.cuda_graph,
        'curvature="ekfac"': settings.curvature == "ekfac",
    }
    if settings.staleness == "basis":
        others |= {
            'solver="cholesky"': settings.solver == "cholesky",
            f"split_dim={settings.split_dim}": settings.split_dim is not None,
        }
    for name, is_set in others.items():
        if is_set:
            raise ValueError(f'staleness="{settings.staleness}" does not go with {name}: leave one of them out')


def check_together(settings: Settings) -> None:
    _check_distribution(settings)
    _check_lag(settings)
    _check_staleness(settings)
    if settings.fisher_fraction != 1 and settings.fisher != "sampled":
        raise ValueError(f'fisher_fraction={settings.fisher_fraction:g} is used by fisher="sampled" alone')
    if settings.fisher != "empirical" and settings.fisher_loss is None:
        raise ValueError(
            f'fisher="{settings.fisher}" needs fisher_loss="cross-entropy", "bernoulli" or "mse": what the model\'s '
            "output predicts cannot be read off a backward pass"
        )
    if not isinstance(settings.flattened, str) and settings.solver == "cholesky":
        raise ValueError(
            'flattened={...} with solver="cholesky": three factors are damped by their eigenvalues; use "eigen" or '
            '"warm-eigen"'
        )
    _check_adam(settings)
    is_clipped = settings.rescale == "kl-clip" and not settings.takes_steps and settings.curvature != "auto"
    if settings.cuda_graph and (is_clipped or settings.curvature == "ekfac"):
        raise ValueError(
            'cuda_graph=True goes with rescale="norm", "norm-global", "norm-kl" or "none" and curvature="adaptive", '
            f'"kfac" or "adam-eigen", not with {settings.rescale!r} and {settings.curvature!r}: what the others '
            "use is not the same from step to step"
        )
    if settings.curvature in ("ekfac", "adam-eigen", "adaptive") and settings.solver == "cholesky":
        raise ValueError(
            f'curvature="{settings.curvature}" lives in eigenbases, which solver="cholesky" does not compute; '
            f'use solver="eigen" or "warm-eigen"'
        )


def _check_adam(settings: Settings) -> None:
    if settings.curvature == "auto":
        return
    is_adam = settings.takes_steps
    if is_adam and settings.rescale == "auto":
        object.__setattr__(settings, "rescale", "none")
    if settings.curvature == "adaptive" and settings.rescale != "none":
        what = 'curvature="adaptive", whose steps have the length of the optimizer\'s own'
        raise ValueError(f"rescale={settings.rescale!r} with {what}; leave rescale out")
    if is_adam and settings.rescale not in ("none", "kl-clip"):
        what = 'curvature="adam-eigen": the length of the step is Adam\'s, at most held back by "kl-clip"'
        raise ValueError(f"rescale={settings.rescale!r} with {what}; leave rescale out")
    if settings.basis_dtype != "float32" and not is_adam:
        raise ValueError(
            f'basis_dtype={settings.basis_dtype!r} goes with curvature="adaptive" or "adam-eigen": where gradients are '
            "divided by small eigenvalues, what is rounded in a basis is divided with them"
        )


def _check_distribution(settings: Settings) -> None:
    if settings.overlap and settings.wire_dtype == "float16":
        raise ValueError(
            'overlap=True with wire_dtype="float16": sums leave before all ranks know how large they are, and '
            'float16 has little range; use "bfloat16"'
        )
    if settings.wire_form == "rows" and (settings.weight_sharing == "reduce" or settings.fisher != "empirical"):
        raise ValueError(
            'wire_form="rows" sends the rows of the training backward: it goes with weight_sharing="expand" and '
            'fisher="empirical"'
        )
    if settings.cluster is not None and not isinstance(settings.cluster, str):
        raise bad("cluster", settings.cluster, "the name of a file of `dkfac measure`, or of a preset", "")
    if settings.cluster is not None and settings.strategy != "auto":
        raise ValueError(
            f'cluster={settings.cluster!r} is what strategy="auto" chooses by; strategy is {settings.strategy!r}'
        )
    fraction: Any = settings.worker_fraction
    if fraction is None:
        return
    if isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 < float(fraction) <= 1:
        raise bad("worker_fraction", fraction, "a number > 0 and <= 1", "it is a share of the ranks")
    if settings.strategy != "hybrid-opt":
        raise ValueError(
            f'worker_fraction={fraction:g} is used by strategy="hybrid-opt" alone; strategy is {settings.strategy!r}'
        )
