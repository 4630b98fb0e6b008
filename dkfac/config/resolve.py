"""Settings: what was given, and what is chosen by the optimizer, the device and a rank's role."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dkfac.config import optimizer_rules, restrictions
from dkfac.config.experimental import EXPERIMENTAL_NAMES, move_old_keywords
from dkfac.config.settings import Curvature, Settings

FREQUENT: dict[str, Any] = {
    "solver": "warm-eigen", "factor_interval": 20, "inverse_interval": 20, "warmup_refresh": (5, 500),
    "factor_decay": 0.8,
}  # fmt: skip
"""For curvatures that keep moments in the eigenbasis, unless intervals are given: bases age faster than inverses, above
all early (docs/notes/005-adam-eigen.md). Factors are measured when they are decomposed."""
GRAPH_ELEMENTS = 2**28
"""Parameters above which the memory of graphs, several times theirs, is not taken unasked."""


def choose_settings(
    settings: Settings | None, options: dict[str, Any], model: nn.Module, optimizer: Any, scaler: Any, roles: Any,
) -> Settings:  # fmt: skip
    """Return what was given in one of two ways, with what it leaves open chosen by optimizer, device and role."""
    chosen = with_length(resolve_settings(settings, options, optimizer), optimizer)
    parameters = list(model.parameters())
    if settings is None and roles is None and parameters and all(is_on_gpu(p) for p in parameters):
        chosen = for_gpu(chosen, options, parameters)
        if "cuda_graph" not in options:
            chosen = replace(chosen, cuda_graph=can_capture(chosen, parameters, optimizer, scaler))
    if optimizer is None:
        restrictions.check_combinations(chosen, "without an optimizer")
    return for_roles(chosen, roles)


def resolve_settings(settings: Settings | None, options: dict[str, Any], optimizer: Any) -> Settings:
    """Return the settings that were given in one of two ways, with what they leave open chosen by the optimizer."""
    if settings is not None and options:
        raise ValueError(f"give settings=... or single options ({', '.join(options)}), not both")
    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"settings={settings!r} is not a dkfac.Settings")
    known = set(Settings.__dataclass_fields__)
    options = move_old_keywords(options)
    unknown = sorted(set(options) - known)
    if unknown:
        close = difflib.get_close_matches(unknown[0], {*known, *EXPERIMENTAL_NAMES}, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        if unknown[0] == "split_dim":
            hint = "block_dim replaces it: factors are measured, sent and used in pieces, not only decomposed; "
        raise TypeError(f"KFAC has no option {unknown[0]!r}; {hint}it has {', '.join(sorted(known))}")
    has_rhythm = settings is not None or not options.keys().isdisjoint(FREQUENT.keys() - {"solver"})
    settings = Settings(**options) if settings is None else settings
    has_rhythm = has_rhythm or settings.experimental.staleness != "fixed" or settings.inverse_lag > 0
    is_adam = optimizer is not None and optimizer_rules.length_of(optimizer) == "adam"
    if settings.curvature == "auto":
        settings = replace(settings, curvature=choose_curvature(settings, optimizer, is_adam=is_adam))
    if not settings.takes_steps or has_rhythm or options.get("solver", "warm-eigen") != "warm-eigen":
        return settings
    return replace(settings, **FREQUENT)


UNUSED = ("damping", "damping_mode", "norm_damping", "rescale", "kl_clip")
"""Settings that ``curvature="adaptive"`` does not use: who changes one means another curvature."""


def choose_curvature(settings: Settings, optimizer: Any, *, is_adam: bool) -> Curvature:
    """Return what ``curvature="auto"`` stands for."""
    if optimizer is None or settings.solver == "cholesky":
        return "kfac"
    defaults = Settings.__dataclass_fields__
    if all(getattr(settings, name) == defaults[name].default for name in UNUSED):
        return "adaptive"
    return "adam-eigen" if is_adam and settings.rescale in ("auto", "none", "kl-clip") else "kfac"


def with_length(settings: Settings, optimizer: Any) -> Settings:
    """Return the settings with the length of updates chosen, where that is left open.

    What a step predicts is known where the optimizer steps by lr times what it is given, and means something where the
    unit of the loss does.
    """
    if settings.rescale != "auto":
        return settings
    is_known = isinstance(optimizer, torch.optim.SGD) and settings.damping_mode == "absolute"
    return replace(settings, rescale="norm-kl" if is_known else "norm-global")


def is_on_gpu(p: Tensor) -> bool:
    """Whether a parameter is on one of the GPUs that defaults were measured on."""
    is_there = p.device.type == "cuda" and torch.version.hip is None
    return is_there and not isinstance(p, nn.parameter.UninitializedParameter)


def for_gpu(settings: Settings, options: dict[str, Any], parameters: Sequence[Tensor]) -> Settings:
    """Return the settings with what makes steps fast on a GPU and is the same on any number of ranks, unless named.

    Decompositions are slow there (docs/notes/004-gpu-speed.md). The cheaper one keeps a damping until it is made anew.
    """
    chosen: dict[str, Any] = {}
    is_adam, is_scheduled = settings.takes_steps, _is_scheduled(settings)
    if settings.curvature == "ekfac":
        return settings
    if is_adam:
        chosen["solver"] = "warm-eigen"
    elif needs_no_eigenvalues(settings, parameters) and not is_scheduled:
        chosen["solver"] = "cholesky"
    if settings.fisher == "empirical":
        chosen["statistics_fraction"] = None
    if not settings.inverse_lag:  # beside a step nothing may be rounded
        chosen["tf32"] = True
    return replace(settings, **{name: value for name, value in chosen.items() if name not in options})


def _is_scheduled(settings: Settings) -> bool:
    return callable(settings.damping) or callable(settings.norm_damping)


def needs_no_eigenvalues(settings: Settings, parameters: Iterable[Tensor]) -> bool:
    """Whether ``solver="cholesky"`` loses nothing: layers on flattened maps are among those with wide inputs."""
    is_wide = any(p.ndim == 2 and p.shape[1] >= settings.max_dim for p in parameters)
    return not is_wide and settings.experimental.flattened is None and settings.experimental.staleness != "basis"


def can_capture(settings: Settings, parameters: Sequence[Tensor], optimizer: Any, scaler: Any) -> bool:
    """Whether a graph of the steps would be used again and again, and its memory need not be asked for."""
    is_adam = settings.takes_steps
    if settings.curvature == "adaptive" and optimizer_rules.length_of(optimizer) == "measured":
        return False
    same = not _is_scheduled(settings) and settings.solver != "eigen"
    same = (
        same
        and settings.experimental.staleness == "fixed"
        and not settings.inverse_lag
        and settings.fisher == "empirical"
    )
    same = same and settings.curvature != "ekfac" and (is_adam or settings.rescale != "kl-clip")
    reads_rates = optimizer is not None and (is_adam or settings.rescale == "norm-kl")
    for group in optimizer.param_groups if reads_rates else ():
        same = same and not isinstance(group["lr"], Tensor)
        same = same and not (is_adam and scaler is not None and group.get("fused"))
    return same and sum(p.numel() for p in parameters) <= GRAPH_ELEMENTS


def for_roles(settings: Settings, roles: Any) -> Settings:
    """Return the settings of gradient workers, who precondition and leave the rest to helpers."""
    if roles is None:
        return settings
    if roles.role != "gradient":
        raise ValueError(f"this rank is a {roles.role} worker: call roles.serve(...) instead of attaching K-FAC")
    if roles.closed:
        raise ValueError("these roles have ended with the K-FAC they were given to: call dkfac.roles again")
    restrictions.check_combinations(settings, "with roles")
    return replace(settings, strategy="replicated", cluster=None)
