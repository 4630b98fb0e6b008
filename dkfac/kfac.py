"""Class KFAC: attach to a model and an optimizer, and precondition the gradients of each step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from dkfac import adam, checkpoint, held, loop, owned, quadratic, report, trust
from dkfac.attach import (
    check_arguments,
    check_layers,
    check_share,
    check_world,
    choose_group,
    connect,
)
from dkfac.capture import Probe
from dkfac.comm import join
from dkfac.crew.remote import Remote
from dkfac.layers.find import find_layers, unwrap
from dkfac.notices import Notices
from dkfac.plan.plan import Plan
from dkfac.profile import choose_settings
from dkfac.run import Runner
from dkfac.settings import Settings
from dkfac.tape import Tape

_ATTACHED: WeakKeyDictionary[nn.Module, ref[KFAC]] = WeakKeyDictionary()
"""Which KFAC preconditions a module."""


def detach(model: nn.Module) -> None:
    """Close every KFAC that is attached to a layer of the model, whoever holds it."""
    for module in unwrap(model).modules():
        attached = _ATTACHED.get(module)
        kfac = None if attached is None else attached()
        if kfac is not None:
            kfac.close()


class KFAC:
    """Second-order steps for a model and an optimizer, from the moment of construction.

    With an optimizer, ``optimizer.step()`` takes preconditioned steps and nothing else in the training loop
    changes. Without one, call ``step(lr=...)`` between ``backward`` and the update.
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
        """Find the layers, hook them and the optimizer, and say in one line what was done.

        Settings are given by name (``KFAC(model, optimizer, damping=1e-3)``) or as one object. ``process_group``: the
        ranks that train copies of this model; None: all, or of ``roles`` the gradient workers. All of them call this.
        """
        check_arguments(model, optimizer, grad_scaler)
        self._process_group = process_group = choose_group(model, process_group if roles is None else roles.group)
        self.settings = choose_settings(settings, options, model, optimizer, grad_scaler, process_group, roles)
        check_share(self.settings, optimizer)
        self._model = unwrap(model)
        self._optimizer = optimizer
        trained = None if optimizer is None else [p for g in optimizer.param_groups for p in g["params"]]
        self.layers, self.left = find_layers(self._model, self.settings, trained)
        check_layers(self.layers, self.left, _ATTACHED)
        if self.settings.takes_steps:
            adam.check(optimizer, self.layers, self.settings.curvature)
        self._tape = Tape(self.layers, self.settings, grad_scaler)
        self._probe = Probe(self._tape, self.settings, has_scaler=grad_scaler is not None)
        notices = Notices(self._model, self.layers, accumulation_is_set=self.settings.accumulate is not None)
        plan, exchange = connect(self.layers, self.settings, process_group)
        self._runner = Runner(self.layers, self.settings, self._tape, notices, plan, exchange)
        self._runner.remote = None if roles is None else Remote(roles, self._model)
        self._probe.watch({name for name, p in self._runner.placements.items() if self._runner.rank in p.statistics})
        self._join_config = join.not_joined()
        if exchange is not None:
            self._probe.before_forward = self._before_forward
        self._closed, self._stepped, self._steps = False, False, loop.Steps()
        self._hidden: list[tuple[Tensor, Tensor | None]] = []
        self._moves: dict[int, Tensor] = {}  # of quadratic_step: the last ones, by the parameters' ids
        self._handles = self._probe.attach(self._model)
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
            if self.plan.share == "weights" and self.plan.world_size > 1:
                self._handles.append(optimizer.register_state_dict_pre_hook(report.warn_of_partial_optimizer))
        _ATTACHED.update({layer.module: ref(self) for layer in self.layers})
        self._plan_next()
        report.warn_of_left(self.left)
        if self.settings.announce and self._runner.rank == 0:
            print(report.announcement(self.layers, self.left, self.settings, optimizer, self.plan), file=sys.stderr)

    @property
    def plan(self) -> Plan:
        """Who does what, under torch.distributed."""
        return self._runner.plan

    def step(self, lr: float | None = None) -> None:
        """Precondition the gradients in place; for loops that call the optimizer themselves.

        ``lr`` is needed by ``rescale="kl-clip"`` and ``"norm-kl"`` alone.
        """
        if self._optimizer is not None:
            raise RuntimeError(
                "this KFAC is attached to an optimizer, whose step() preconditions already; "
                "use KFAC(model) for a loop that calls kfac.step() itself"
            )
        self._run(lr)

    def lm_step(self, loss: Tensor | float, closure: Callable[[], Tensor | float]) -> None:
        """Take the optimizer's step and, every few steps, change a ``damping=dkfac.LevenbergMarquardt(...)`` by how
        well the quadratic model predicted it. ``loss``: of this batch; ``closure`` returns it again, after the step.
        """
        optimizer, damping = trust.check(self.settings, self._optimizer)
        trust.step(self._runner, self._model, optimizer, damping, loss, closure)

    def quadratic_step(self, closure: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """Move the parameters by preconditioned gradients, with the length and momentum at which the quadratic model of
        the loss is least, instead of ``optimizer.step()``. ``closure`` returns loss and output of the model."""
        parameters = [p for p in self._parameters() if p.grad is not None]
        quadratic.take(self._runner, self._model, parameters, self._moves, self._run, closure, self._optimizer)

    def set_terms(self, n: Tensor | float, mask: Tensor | None = None) -> None:
        """Say that the next backward pass is a mean over ``n`` terms (padding, ignored labels), before it runs.

        ``mask``, True where a position counts, keeps padding out of A in the layers that see each position.
        """
        if not isinstance(n, Tensor) and not n > 0:
            raise ValueError(f"set_terms(n={n!r}): n is the number of terms of the loss and must be > 0")
        self._tape.set_terms(n, mask)

    def discard(self) -> None:
        """Forget the statistics since the last step, for a loop that drops a backward pass it has run."""
        self._tape.discard()

    def factors(self) -> dict[str, dict[str, Tensor]]:
        """Return the running factors held here, ``{layer: {key: tensor}}``; a single block's dimension is squeezed.

        Under torch.distributed each rank holds what it decomposes.
        """
        result: dict[str, dict[str, Tensor]] = {}
        for name, state in self._runner.states.items():
            means = {key: average.mean() for key, average in state.running.items()}
            result[name] = {key: m.squeeze(0) if m.shape[0] == 1 else m for key, m in means.items()}
        return result

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last step as floats, for any logger. Waits for the device."""
        runner = self._runner
        return report.metrics(runner.step, self.settings, runner.counters, runner.device, self._tape.num_abandoned)

    def report(self) -> dict[str, Any]:
        """Return counters, memory in bytes, seconds by stage and what travels. Waits for the device."""
        counters = {key: int(value) for key, value in self.metrics().items() if key in report.COUNTERS}
        return report.full(self._runner, counters)

    def state_dict(self, *, decompositions: bool = True, gather: bool = False) -> dict[str, Any]:
        """Return the state by layer name: tensors, numbers and strings only.

        Without ``decompositions`` it is about half as large; the first measured step after loading decomposes anew,
        so it does not resume bitwise. Under torch.distributed each rank returns what it holds, as
        ``torch.distributed.checkpoint`` wants it; with ``gather``, called on all ranks, rank 0 returns everything and
        the others an empty dict. It loads on any number of ranks under any strategy.
        """
        runner = self._runner
        runner.settle()
        state = checkpoint.save(
            runner.states,
            self._runner.by_name,
            runner.holds,
            step=runner.step,
            counters={**runner.counters, "abandoned": self._tape.num_abandoned},
            device=runner.device,
            decompositions=decompositions,
            **runner.saved(),
        )
        state["share"] = self.settings.share
        if isinstance(self.settings.damping, trust.LevenbergMarquardt):
            state["damping"] = self.settings.damping.value
        if self.settings.share == "weights" and not adam.hides(self.settings, self._optimizer):
            for layer in filter(lambda la: runner.steps(la.name), self.layers):
                state["layers"][layer.name]["optimizer"] = owned.save(self._optimizer, layer)
        state |= quadratic.saved(self._model, self._moves)
        if gather and runner.exchange is not None:
            parts = runner.exchange.gather_state(state)
            return {} if parts is None else checkpoint.merge(parts)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state saved by ``state_dict``, on any device, any number of ranks and under any strategy.

        Under torch.distributed all ranks load. With ``share="weights"`` load the optimizer's state first.
        """
        runner = self._runner
        loaded = checkpoint.load(state, runner.by_name, runner.holds)
        self._tape.num_abandoned = loaded.counters.pop("abandoned", 0)
        if isinstance(self.settings.damping, trust.LevenbergMarquardt):
            self.settings.damping.value = float(state.get("damping", self.settings.damping.value))
        runner.resume(loaded)
        for layer in () if adam.hides(self.settings, self._optimizer) else self.layers:
            saved = state["layers"][layer.name].get("optimizer")
            if not saved and state.get("share") == "weights" and runner.steps(layer.name):
                report.warn_of_lost_optimizer(layer.name)
            if saved and runner.steps(layer.name):
                owned.load(self._optimizer, layer, saved)
        self._moves = quadratic.loaded(self._model, state)
        self._tape.discard()
        self._plan_next()

    def close(self) -> None:
        """Remove every hook; the optimizer steps on raw gradients again."""
        self._give_back()
        self._runner.close()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not self._closed:
            for layer in self.layers:
                _ATTACHED.pop(layer.module, None)
            if self._runner.exchange is not None:
                self._runner.exchange.groups.close()
        self._closed = True

    def __enter__(self) -> KFAC:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return report.table(self.layers, self.left, self._runner.states)

    # --- uneven inputs: ``Join([model, kfac])`` --------------------------------------------------------------

    def join_hook(self, **_: Any) -> Any:
        """Return what this rank does for K-FAC once it has run out of batches, a step for each of the others'."""
        plan = self._runner.plan
        if any(len(p.preconditioned_by) < plan.world_size for p in plan.placements):
            raise ValueError(
                f"strategy={plan.strategy!r} has layers preconditioned by ranks that may run out of batches, and then "
                f'have no gradient; uneven inputs need strategy="comm-opt" or "replicated"'
            )
        return join.hook(self._shadow)

    @property
    def join_device(self) -> torch.device:
        return self.layers[0].weight.device

    @property
    def join_process_group(self) -> Any:
        return join.process_group(self._process_group)

    def _shadow(self) -> None:
        with torch.no_grad():
            self._runner.shadow_step()
        self._plan_next()

    def _before_forward(self) -> None:
        """In the model's forward, where there are several ranks."""
        if not self._join_config.enable and join.ddp_joins():
            raise RuntimeError(
                "uneven inputs: K-FAC's ranks would wait for one that has run out of batches; use "
                "torch.distributed.algorithms.Join([model, kfac]) instead of model.join()"
            )

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The optimizer's pre-hook. A closure computes the gradients later, so it is wrapped."""
        if not self._steps.enter():
            return None
        self._give_back()  # of a step that did not end
        closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            if not loop.is_dummy(optimizer, self._parameters()):
                self._run(None)
            return None

        def preconditioned() -> Any:
            loss = closure()
            self._run(None)
            return loss

        if len(args) > 1:
            return (args[0], preconditioned, *args[2:]), kwargs
        return args, {**kwargs, "closure": preconditioned}

    def _hide_stepped(self) -> None:
        """Take the gradients away whose step has been taken: the optimizer leaves such parameters alone."""
        for p in self._runner.stepped:
            self._hidden.append((p, p.grad))
            p.grad = None
        self._runner.stepped.clear()

    def _give_back(self) -> None:
        """Put hidden gradients back where there are no others."""
        for p, grad in self._hidden:
            p.grad = grad if p.grad is None else p.grad
        self._hidden.clear()

    def _after_step(self, *_: Any) -> None:
        """The optimizer's post-hook: give gradients back, and share what is stepped by its owner alone."""
        if not self._steps.leave():
            return
        self._give_back()
        if self._runner.grafts is not None:
            self._runner.grafts.finish()
            self._runner.grafts = None
        if self._stepped:
            self._stepped = False
            self._runner.share_weights()

    def _run(self, lr: float | None = None) -> None:
        """Take K-FAC's part of a step, whatever precision the loop runs in."""
        if self._closed:
            raise RuntimeError("this KFAC is closed: it has no statistics to precondition with")
        loop.check_scaler(self._optimizer, has_scaler=self._probe.has_scaler)
        check_world(self._runner.plan.world_size, self._process_group)
        needs_rates = self.settings.rescale in held.HELD and not self._runner.is_adam
        rates = loop.learning_rates(self._optimizer, self._model.parameters(), lr) if needs_rates else {}
        with torch.no_grad(), torch.autocast(self.join_device.type, enabled=False):
            self._runner.take_step(self._optimizer, self._parameters(), rates)
        self._stepped = True
        self._hide_stepped()
        self._plan_next()

    def _plan_next(self) -> None:
        """Decide what the coming step measures, before its forward."""
        self._runner.plan_next()
        self._probe.measuring = self._runner.measuring
        self._probe.forget_sizes()
        self._tape.forget_terms()

    def _parameters(self) -> list[Tensor]:
        """What the coming step will update."""
        if self._optimizer is None:
            return list(self._model.parameters())
        return [p for group in self._optimizer.param_groups for p in group["params"]]
