"""The private names of torch that dkfac uses, in one place: they may go with any release.

Input: the installed torch. Output: the functions, under names of our own; an ``ImportError`` that names those that are
missing. Owns: nothing. ``tests/ops/test_torch_private.py`` finds uses elsewhere; ``tests/smoke.py`` tries a version.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

TRIED = ("2.6", "2.15")
"""The oldest and the newest version that ``tests/smoke.py`` was run with."""
MISSING: list[str] = []


def _find(path: str, without: Any = None) -> Any:
    """Return what has this dotted name in torch; ``without``: what to use where torch lacks it."""
    try:
        return functools.reduce(getattr, path.split("."), torch)
    except AttributeError:
        if without is None:
            MISSING.append(f"torch.{path}")
        return without


current_graph_task_id: Callable[[], int] = _find("_C._current_graph_task_id")
current_autograd_node: Callable[[], Any] = _find("_C._current_autograd_node")
will_engine_execute_node: Callable[[Any], bool] = _find("_C._will_engine_execute_node")
functorch_is_active: Callable[[], bool] = _find("_C._are_functorch_transforms_active")
jit_is_tracing: Callable[[], bool] = _find("_C._is_tracing")
top_saved_tensors_hooks: Callable[[bool], Any] = _find(
    "_C._autograd._top_saved_tensors_default_hooks", without=lambda _: ()
)
"""Return the hooks for saved tensors in force, else None. torch before 2.8 does not tell: it seems as if there were
some always, and layers are measured in the way that is right with and without them, if slower."""
engine_callback: Callable[[Callable[[], None]], None] = _find("autograd.Variable._execution_engine.queue_callback")
preserve_version_counter: Any = _find("autograd.grad_mode._unsafe_preserve_version_counter")
DispatchKeySet: Any = _find("_C.DispatchKeySet")
DispatchKey: Any = _find("_C.DispatchKey")
ForceDispatchKeyGuard: Any = _find("_C._ForceDispatchKeyGuard")
foreach_copy_: Callable[..., None] = _find("_foreach_copy_")
foreach_add_: Callable[..., None] = _find("_foreach_add_")
foreach_mul_: Callable[..., None] = _find("_foreach_mul_")
foreach_mul: Callable[..., Any] = _find("_foreach_mul")
foreach_norm: Callable[..., Any] = _find("_foreach_norm")
reparametrize_module: Any = _find("nn.utils.stateless._reparametrize_module")
value_by_policy: Callable[..., Any] = _find("optim.Optimizer._process_value_according_to_param_policy")
scaled_step: Any = _find("amp.GradScaler._maybe_opt_step")
default_store: Callable[[], Any] = _find("distributed.distributed_c10d._get_default_store", without=lambda: None)

if MISSING:
    raise ImportError(
        f"torch {torch.__version__} has no {', '.join(MISSING)}, which dkfac uses; "
        f"dkfac was tried with torch {TRIED[0]} to {TRIED[1]}"
    )


def load_forward_mode_formulas() -> None:
    """Register the formulas with which forward-mode differentiation covers more operations."""
    importlib.import_module("torch._decomp.decompositions_for_jvp")
