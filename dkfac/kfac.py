"""Class ``KFAC``: attach to a model and an optimizer, and precondition the gradients of each step.

Input: a model, an optimizer and settings. Output: preconditioned steps. Owns: the hooks and the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from dkfac.capture.hooks import CaptureContext
from dkfac.capture.split_layers import make_collector
from dkfac.comm import groups, join
from dkfac.config import optimizer_rules
from dkfac.config.settings import Settings
from dkfac.plan.plan import Plan
from dkfac.precondition import trust_region
from dkfac.runtime import attach, connect, levenberg_marquardt, optimizer_hooks, quadratic, report
from dkfac.runtime.engine import Engine
from dkfac.runtime.notices import Notices
from dkfac.runtime.optimizer_checkpoint import OptimizerCheckpoint
from dkfac.runtime.report import Instruments
from dkfac.runtime.scaler_search import ScalerSearch
from dkfac.state import checkpoint, optimizer_state, restore, saved_parts, whole_factors
from dkfac.workers.remote import Remote


class KFAC:
    """Preconditions the gradients of a model by K-FAC (Kronecker-factored approximate curvature).

    With an optimizer, ``optimizer.step()`` takes preconditioned steps from construction on, and nothing else in the
    training loop changes. Without one, call :meth:`step` between ``backward()`` and the update. All ranks of the
    process group must construct it, with the same settings.

    Args:
        model: the model to train, possibly wrapped in DDP.
        optimizer: the optimizer whose steps are preconditioned, possibly wrapped by Accelerate, Lightning or Fabric.
        grad_scaler: the ``torch.amp.GradScaler``, if there is no optimizer; otherwise it is found at the first step.
        process_group: the ranks that train replicas of the model (default: the group of DDP, or all ranks).
        roles: the result of :func:`dkfac.roles`; the process group is then that of the gradient workers.
        settings: a :class:`Settings` object. Or pass its fields by name: ``KFAC(model, optimizer, damping=1e-3)``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        grad_scaler: Any = None,
        process_group: Any = None,
        roles: Any = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        """Find the layers, register hooks on them and the optimizer, and print a one-line summary. Collective."""
        found = attach.prepare_attachment(model, optimizer, grad_scaler, process_group, roles, settings, options)
        self._process_group, self.layers = found.process_group, found.layers
        self._model, self._optimizer, self.left = found.model, found.optimizer, found.left
        optimizer, finds_scaler = found.optimizer, found.optimizer is not None and grad_scaler is None
        notices = Notices(self._model, self.layers, accumulation_is_set=found.settings.accumulate is not None)
        transport, errors = connect.connect(found)
        self.settings = connect.without_idle_graphs(found.settings, transport.plan, settings, options)
        is_alone = not transport.program.transfers  # nothing to agree on
        how: dict[str, Any] = {"rank": transport.rank, "decides_alone": is_alone, "keep_error": errors.keep}
        self._collector = make_collector(self.layers, self.settings, grad_scaler, **how)
        remote = None if roles is None else Remote(roles, self._model)
        self._engine = Engine(self.layers, self.settings, self._collector, notices, transport, errors, remote)
        measured = {name for name, p in self._engine.ranks.placements.items() if transport.rank in p.statistics}
        self._capture = CaptureContext(
            self._collector, self.settings, has_scaler=grad_scaler is not None, finds_scaler=finds_scaler,
            measured=measured, before_forward=None if is_alone else lambda: attach.check_join(self._join_config),
        )  # fmt: skip
        self._join_config, self._closed = join.not_joined(), False
        self._in_optimizer: OptimizerCheckpoint | None = None
        self._moves: dict[int, Tensor] = {}  # of quadratic_step: the last moves by id(parameter)
        search = ScalerSearch(self._capture, self._collector, self.settings) if finds_scaler else None
        self._hooks = optimizer_hooks.OptimizerHooks(self._run, self._engine.share_weights, search)
        self._handles = self._capture.attach(self._model)
        if optimizer is not None:
            save, states = self.state_dict if is_alone else None, lambda: (self._engine.states, self._engine.step)
            args = (optimizer, self.layers, self.settings, states, save, self.load_state_dict)
            self._in_optimizer = OptimizerCheckpoint(*args)
            self._handles += [*self._in_optimizer.attach(), *self._hooks.attach(optimizer)]
            if transport.program.stage("weights"):
                self._handles.append(optimizer.register_state_dict_pre_hook(report.warn_of_partial_optimizer))
        attach.ATTACHED.update({layer.module: ref(self) for layer in self.layers})
        self._plan_next()
        report.warn_of_left(self.left)
        if self.settings.announce and transport.rank == 0:
            sys.stderr.write(report.announcement(self.layers, self.left, self.settings, optimizer, self.plan) + "\n")

    @property
    def plan(self) -> Plan:
        """The plan: which ranks measure, hold, decompose and precondition each layer."""
        return self._engine.ranks.plan

    def step(self, lr: float | None = None) -> None:
        """Precondition the gradients in place, for training loops that do not pass an optimizer to ``KFAC``.

        ``lr`` is the learning rate, which only ``rescale="kl-clip"`` and ``"norm-kl"`` require.
        """
        if self._optimizer is not None:
            raise RuntimeError(
                "this KFAC is attached to an optimizer, whose step() preconditions already; "
                "use KFAC(model) for a loop that calls kfac.step() itself"
            )
        self._run(lr)

    def lm_step(self, loss: Tensor | float, closure: Callable[[], Tensor | float]) -> None:
        """Take the optimizer's step and adapt a ``damping=dkfac.LevenbergMarquardt(...)`` every few steps.

        The damping follows how well the quadratic model predicts the change of the loss. ``loss`` is the loss of this
        batch before the step; ``closure`` evaluates it again after the step.
        """
        optimizer, damping = levenberg_marquardt.check_damping(self.settings, self._optimizer)
        levenberg_marquardt.check_unscaled(self._collector.scaler, optimizer)
        engine = self._engine
        if engine.step % damping.every:
            optimizer.step()
            return
        levenberg_marquardt.lm_step(
            engine.ranks, engine.states, engine.transport, self._model, optimizer, damping, loss, closure
        )

    def quadratic_step(self, closure: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Move the parameters along the preconditioned gradients; call it instead of ``optimizer.step()``.

        Step length and momentum minimize the quadratic model of the loss. ``closure`` evaluates the model on this batch
        and returns the loss and the model's output.
        """
        parameters = [p for p in self._parameters() if p.grad is not None]
        quadratic.check_settings(self.settings, has_terms=self._collector.has_terms)
        levenberg_marquardt.check_unscaled(self._collector.scaler, self._optimizer)
        context, transport = self._engine.context, self._engine.transport
        quadratic.take(context, transport, self._model, parameters, self._moves, self._run, closure)

    def set_terms(self, n: Tensor | float, mask: Tensor | None = None) -> None:
        """Declare, before it runs, that the next backward pass is of a mean over ``n`` terms.

        ``n`` does not count padding and ignored labels. ``mask``, True where a position counts, excludes padding from A
        in layers that see every position.
        """
        if not isinstance(n, Tensor) and not n > 0:
            raise ValueError(f"set_terms(n={n!r}): n is the number of terms of the loss and must be > 0")
        self._collector.set_terms(n, mask)

    def discard(self) -> None:
        """Discard the statistics since the last step, for a training loop that drops a backward pass."""
        self._collector.discard()

    def factors(self) -> dict[str, dict[str, Tensor]]:
        """Return the running factors that this rank holds, as ``{layer: {key: tensor}}``.

        A tensor is ``[blocks, d, d]``, or ``[blocks, d]`` if diagonal; a single block is squeezed. Blocks of attention
        are ``attn.in_proj.q``, ``.k``, ``.v``. Under torch.distributed, each rank holds the factors that it decomposes.
        """
        return self._engine.factors()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last step as floats, for any logger. Synchronizes with the device."""
        metrics, step, abandoned = self._engine.metrics, self._engine.step, self._collector.num_abandoned
        return report.metrics(step, self.settings, metrics.counters, metrics.device_metrics, abandoned)

    def report(self) -> dict[str, Any]:
        """Return counters, memory in bytes, seconds by stage and the plan's transfers. Synchronizes with the device."""
        engine = self._engine
        counters = {key: int(value) for key, value in self.metrics().items() if key in report.COUNTERS}
        return report.full(
            engine.step, counters, engine.states, self._collector.timer.seconds(), engine.metrics.tf32_unsafe_layers,
            engine.refresher.staleness, engine.transport,
        )  # fmt: skip

    def instruments(self) -> Instruments:
        """Return what the timeline of a step is recorded from."""
        engine, timer = self._engine, self._collector.timer
        return Instruments(self.settings, self.layers, engine.transport, timer, engine.replanner.rows_seen)

    def state_dict(self, *, decompositions: bool = True, gather: bool = False, shard: bool = False) -> dict[str, Any]:
        """Return the state by layer name, as tensors, numbers and strings.

        It loads on any number of ranks and under any strategy. Each rank returns what it holds, as torch's DCP expects.

        Args:
            decompositions: if False, the state is about half as large, but does not resume bitwise: the first measured
                step after loading decomposes again.
            gather: collect the state on rank 0; other ranks return an empty dict. All ranks must call it.
            shard: leave out what an earlier rank returns too, for files that :meth:`load_state_dict` gets as a list.
        """
        engine = self._engine
        if self._in_optimizer is not None:
            self._in_optimizer.note_saved()
        engine.settle()
        counters = {**engine.metrics.counters, "abandoned": self._collector.num_abandoned}
        state = checkpoint.save(
            engine.states, engine.ranks.by_name, engine.ranks.holds, step=engine.step, counters=counters,
            device=engine.metrics.device_metrics, decompositions=decompositions, **engine.refresher.saved(engine.ranks),
        )  # fmt: skip
        state |= {"share": self.settings.share, "block_dim": self.settings.block_dim or 0}
        if isinstance(self.settings.damping, levenberg_marquardt.LevenbergMarquardt):
            state["damping"] = self.settings.damping.value
        if self.settings.share == "weights" and not optimizer_rules.hides(self.settings, self._optimizer):
            owned = [layer for layer in self.layers if engine.ranks.steps(layer.name)]
            optimizer_state.save_owned(self._optimizer, owned, state)
        state |= quadratic.saved(self._model, self._moves)
        return saved_parts.share_out(state, engine.ranks, engine.transport, gather=gather, shard=shard)

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Load a state that :meth:`state_dict` returned, on any device, any number of ranks and any strategy.

        Under torch.distributed, all ranks must call it. With ``share="weights"``, load the optimizer's state first.
        """
        engine, layers = self._engine, self._engine.ranks.by_name
        state = whole_factors.to_pieces(checkpoint.merge(state), layers, self.settings.block_dim)
        loaded = restore.load(state, layers, engine.ranks.holds)
        self._collector.count_abandoned(loaded.counters.pop("abandoned", 0))
        if isinstance(self.settings.damping, levenberg_marquardt.LevenbergMarquardt):
            self.settings.damping.value = float(state.get("damping", self.settings.damping.value))
        engine.resume(loaded)
        if not optimizer_rules.hides(self.settings, self._optimizer):
            owned = [layer for layer in self.layers if engine.ranks.steps(layer.name)]
            optimizer_state.load_owned(self._optimizer, owned, state)
        self._moves = quadratic.loaded(self._model, state)
        self._collector.discard()
        self._plan_next()

    def close(self) -> None:
        """Remove all hooks. The optimizer then steps on raw gradients again."""
        self._hooks.give_back()
        is_shared = not self.plan.shares_no_updates
        if self._in_optimizer is not None and not self._closed and not is_shared:  # otherwise ranks would diverge
            self._in_optimizer.hand_over()
        self._engine.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not self._closed:
            for layer in self.layers:
                attach.ATTACHED.pop(layer.module, None)
            self._engine.transport.close()
        self._closed = True

    def __enter__(self) -> KFAC:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return report.table(self.layers, self.left, self._engine.states)

    # --- uneven inputs: ``Join([model, kfac])`` --------------------------------------------------------------

    def join_hook(self, **_: Any) -> Any:
        """Return the hook that takes part in the other ranks' K-FAC steps once this rank has run out of batches."""
        attach.check_uneven_inputs(self.plan)
        return join.hook(self._shadow)

    @property
    def join_device(self) -> torch.device:
        return self.layers[0].weight.device

    @property
    def join_process_group(self) -> Any:
        return join.process_group(self._process_group)

    def _shadow(self) -> None:
        with torch.no_grad():
            self._engine.shadow_step()
        self._plan_next()

    def _run(self, lr: float | None = None) -> None:
        """Run K-FAC's part of a step, independent of the loop's autocast context."""
        if self._closed:
            raise RuntimeError("this KFAC is closed: it has no statistics to precondition with")
        groups.check_world(self.plan.world_size, self._process_group)
        needs_rates = self.settings.rescale in trust_region.HELD and not self.settings.takes_steps
        rates = optimizer_hooks.learning_rates(self._optimizer, self._model.parameters(), lr) if needs_rates else {}
        with torch.no_grad(), torch.autocast(self.join_device.type, enabled=False):
            done = self._engine.take_step(self._optimizer, self._parameters(), rates)
        self._hooks.begin(done)
        self._plan_next()

    def _plan_next(self) -> None:
        """Decide what the next step measures. Called before its forward pass."""
        context = self._engine.plan_next()
        self._capture.begin_step(measuring=context.measures)
        self._collector.forget_terms()

    def _parameters(self) -> list[Tensor]:
        """Return the parameters that the next step will update."""
        if self._optimizer is None:
            return list(self._model.parameters())
        return [p for group in self._optimizer.param_groups for p in group["params"]]
