"""Which settings go together, and what is said where they do not."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dkfac.settings import Settings


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
    whole = isinstance(warmup, (tuple, list)) and len(warmup) == 2
    if not whole or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in warmup):
        raise bad("warmup_refresh", warmup, "None or (every, until), integers >= 1", "early steps use it as a rhythm")
    object.__setattr__(settings, "warmup_refresh", tuple(warmup))


def check_together(settings: Settings) -> None:
    _check_distribution(settings)
    if settings.fisher == "exact" and settings.exact_loss is None:
        raise ValueError(
            'fisher="exact" needs exact_loss="cross-entropy" or "mse": the Hessian of the loss with '
            "respect to the model's output cannot be read off a backward pass"
        )
    _check_adam(settings)
    if settings.cuda_graph and (settings.rescale == "kl-clip" or settings.curvature == "ekfac"):
        raise ValueError(
            'cuda_graph=True goes with rescale="norm", "norm-global" or "none" and curvature="kfac" or '
            f'"adam-eigen", not with {settings.rescale!r} and {settings.curvature!r}: what the others use is not the '
            "same from step to step"
        )
    if settings.curvature in ("ekfac", "adam-eigen") and settings.solver == "cholesky":
        raise ValueError(
            f'curvature="{settings.curvature}" lives in eigenbases, which solver="cholesky" does not compute; '
            f'use solver="eigen" or "warm-eigen"'
        )


def _check_adam(settings: Settings) -> None:
    if settings.curvature == "auto":
        return
    is_adam = settings.curvature == "adam-eigen"
    if settings.rescale == "auto":
        object.__setattr__(settings, "rescale", "none" if is_adam else "norm-global")
    elif is_adam and settings.rescale != "none":
        what = 'curvature="adam-eigen": the length of the step is Adam\'s'
        raise ValueError(f"rescale={settings.rescale!r} with {what}; leave rescale out")
    if settings.basis_dtype != "float32" and not is_adam:
        raise ValueError(
            f'basis_dtype={settings.basis_dtype!r} goes with curvature="adam-eigen" alone: where gradients are divided '
            "by small eigenvalues, what is rounded in a basis is divided with them"
        )


def _check_distribution(settings: Settings) -> None:
    if settings.overlap and settings.wire_dtype == "float16":
        raise ValueError(
            'overlap=True with wire_dtype="float16": sums leave before all ranks know how large they are, and '
            'float16 has little range; use "bfloat16"'
        )
    if settings.wire_form == "rows" and (settings.weight_sharing == "reduce" or settings.fisher == "exact"):
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
