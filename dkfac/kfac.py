"""Class KFAC: attach to a model and an optimizer, and precondition the gradients of each step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from dkfac import checkpoint, health, report, run
from dkfac.attach import check_arguments, check_layers, resolve_settings
from dkfac.capture import Probe
from dkfac.layers.find import find_layers, unwrap
from dkfac.layers.layer import read_grad, split_grad
from dkfac.notices import Notices
from dkfac.refresh import RUNGS
from dkfac.settings import Settings
from dkfac.state import LayerState
from dkfac.tape import BatchStatistics, Tape

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
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        """Find the layers, hook them and the optimizer, and say in one line what was done.

        Settings are given by name (``KFAC(model, optimizer, damping=1e-3)``) or as one object.
        """
        self.settings = resolve_settings(settings, options)
        check_arguments(model, optimizer, grad_scaler)
        self._model = unwrap(model)
        self._optimizer = optimizer
        trained = None if optimizer is None else [p for g in optimizer.param_groups for p in g["params"]]
        self.layers, self.left = find_layers(self._model, self.settings, trained)
        self._by_name = {layer.name: layer for layer in self.layers}
        check_layers(self.layers, self.left, _ATTACHED)
        self._tape = Tape(self.layers, self.settings, grad_scaler)
        self._probe = Probe(self._tape, self.settings, has_scaler=grad_scaler is not None)
        self._states = {layer.name: LayerState() for layer in self.layers}
        self._step = 0
        self._timer = self._tape.timer
        self._counters: dict[str, int] = {"refreshes": 0, **dict.fromkeys(RUNGS, 0)}
        self._device: dict[str, Tensor] = {}
        self._health = health.Watch()
        self._notices = Notices(self._model, self.layers, accumulation_is_set=self.settings.accumulate is not None)
        self._closed = False
        self._handles = self._probe.attach(self._model)
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        _ATTACHED.update({layer.module: ref(self) for layer in self.layers})
        self._plan_next()
        report.warn_of_left(self.left)
        if self.settings.announce:
            print(report.announcement(self.layers, self.left, self.settings, optimizer), file=sys.stderr)

    # --- what a user calls ---------------------------------------------------------------------------------

    def step(self, lr: float | None = None) -> None:
        """Precondition the gradients in place; for loops that call the optimizer themselves.

        ``lr`` is needed by ``rescale="kl-clip"`` alone.
        """
        if self._optimizer is not None:
            raise RuntimeError(
                "this KFAC is attached to an optimizer, whose step() preconditions already; "
                "use KFAC(model) for a loop that calls kfac.step() itself"
            )
        if self._closed:
            raise RuntimeError("this KFAC is closed: it has no statistics to precondition with")
        self._run(lr)

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
        """Return the running factors, ``{layer: {key: tensor}}``; a single block's dimension is squeezed."""
        result: dict[str, dict[str, Tensor]] = {}
        for name, state in self._states.items():
            means = {key: average.mean() for key, average in state.running.items()}
            result[name] = {key: m.squeeze(0) if m.shape[0] == 1 else m for key, m in means.items()}
        return result

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last step as floats, for any logger. Waits for the device."""
        return report.metrics(self._step, self.settings, self._counters, self._device, self._tape.num_abandoned)

    def report(self) -> dict[str, Any]:
        """Return counters, memory in bytes and seconds by stage. Waits for the device."""
        return {
            "steps": self._step,
            "layers": len(self.layers),
            "counters": {key: int(value) for key, value in self.metrics().items() if key in report.COUNTERS},
            "memory_bytes": {name: state.num_bytes() for name, state in self._states.items()},
            "total_memory_bytes": sum(state.num_bytes() for state in self._states.values()),
            "stage_seconds": self._timer.seconds(),
        }

    def state_dict(self, *, decompositions: bool = True) -> dict[str, Any]:
        """Return the state by layer name: tensors, numbers and strings only.

        Without ``decompositions`` it is about half as large; the first measured step after loading decomposes anew,
        so it does not resume bitwise.
        """
        counters = {**self._counters, "abandoned": self._tape.num_abandoned}
        return checkpoint.save(self._states, self._step, counters, self._device, decompositions)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state saved by ``state_dict``, on any device."""
        loaded = checkpoint.load(state, self._by_name)
        self._states, self._step = loaded.states, loaded.step
        self._tape.num_abandoned = loaded.counters.pop("abandoned", 0)
        self._counters = {"refreshes": 0, **dict.fromkeys(RUNGS, 0), **loaded.counters}
        self._device = loaded.device
        self._tape.discard()
        self._publish_bases()
        self._plan_next()

    def close(self) -> None:
        """Remove every hook; the optimizer steps on raw gradients again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if not self._closed:
            for layer in self.layers:
                _ATTACHED.pop(layer.module, None)
        self._closed = True

    def __enter__(self) -> KFAC:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return report.table(self.layers, self.left, self._states)

    # --- one step ------------------------------------------------------------------------------------------

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The optimizer's pre-hook. A closure computes the gradients later, so it is wrapped."""
        closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            if not self._is_dummy(optimizer):
                self._run(None)
            return None

        def preconditioned() -> Any:
            loss = closure()
            self._run(None)
            return loss

        if len(args) > 1:
            return (args[0], preconditioned, *args[2:]), kwargs
        return args, {**kwargs, "closure": preconditioned}

    def _is_dummy(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step is one without effect, as distributed checkpoints take to make an optimizer's state."""
        rates = [group["lr"] for group in optimizer.param_groups]
        return self._tape.window.num_passes == 0 and all(isinstance(lr, (int, float)) and lr == 0 for lr in rates)

    def _run(self, lr: float | None) -> None:
        """Take K-FAC's part of a step, whatever precision the loop runs in."""
        device_type = self.layers[0].weight.device.type
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            self._run_stages(lr)

    def _run_stages(self, lr: float | None) -> None:
        """Statistics in, preconditioned gradients out. No stage reads from a later one."""
        parameters = self._parameters()
        gradients = [p.grad for p in parameters if p.grad is not None]
        gradients = [g._values() if g.is_sparse else g for g in gradients]
        device = gradients[0].device if gradients else self.layers[0].weight.device
        self._check_scaler()
        for layer in self.layers:
            self._states[layer.name].follow(layer.weight, layer.dtype)
        good = run.gradients_are_finite(gradients, getattr(self._optimizer, "found_inf", None), device)
        good_batch = good
        if self._probe.measuring:
            num_passes = self._tape.window.num_passes
            self._notices.accumulation(num_passes)
            with self._timer.stage("average", device):
                batch = self._tape.take()
                self._notices.capture(batch, num_passes)
                good_batch = self._average(batch, good, device)
        with self._timer.stage("decompose", device):
            self._decompose()
        with self._timer.stage("precondition", device):
            self._precondition(lr, device)
            bad = ~good
            for gradient in gradients:
                gradient.masked_fill_(bad.to(gradient.device), 0)
        self._count("skipped_batches", ~good_batch)
        self._step += 1
        self._plan_next()

    def _plan_next(self) -> None:
        """Decide what the coming step measures, before its forward."""
        self._probe.measuring, self._decomposing = self.settings.rhythm(self._step)
        self._probe.forget_sizes()
        self._tape.forget_terms()

    def _average(self, batch: dict[str, BatchStatistics], good: Tensor, device: torch.device) -> Tensor:
        """Absorb the batch factors unless anything in them is not finite; returns whether they were good."""
        good = good & run.all_finite(batch.values(), device)
        decay = self.settings.at("factor_decay", self._step)
        for name, statistics in batch.items():
            run.average(self._by_name[name], self._states[name], statistics, decay=decay, good=good)
        for name in self._tape.without_moments:
            self._states[name].moments = None
        return good

    def _decompose(self) -> None:
        """Refresh the decompositions; between refreshes only those of layers first seen since the last."""
        due = [
            layer
            for layer in self.layers
            if (state := self._states[layer.name]).running
            and (self._decomposing or (self._probe.measuring and state.decomposed_at < 0))
        ]
        rungs = [r for la in due for r in run.decompose(la, self._states[la.name], self.settings, self._step)]
        if not rungs:
            return
        for rung in rungs:
            self._counters[rung] += 1
        self._counters["refreshes"] += 1
        self._notices.thawed()
        self._publish_bases()
        dominated = sum(run.is_dominated(la, self._states[la.name], self.settings, self._step) for la in due)
        self._health.look(
            self._step,
            kfac_seconds=sum(self._timer.seconds(wait=False).values()),
            dominated_share=dominated / len(due),
            clipped_share=float(self._device.get("clipped_steps", 0.0)) / max(1, self._step),
        )

    def _precondition(self, lr: float | None, device: torch.device) -> None:
        """Replace the gradients of the layers by preconditioned ones of the right length."""
        ready = [layer for layer in self.layers if run.is_ready(layer, self._states[layer.name])]
        pairs = [(layer, grad) for layer in ready if (grad := read_grad(layer)) is not None]
        if not pairs:
            return
        layers, raw = [layer for layer, _ in pairs], [grad for _, grad in pairs]
        updates = [run.direction(la, self._states[la.name], grad, self.settings, self._step) for la, grad in pairs]
        before, after = run.norms(raw, device), run.norms(updates, device)
        sane = torch.isfinite(after)
        after = torch.where(sane, after, before)
        updates = [torch.where(sane[i].to(u.device), u, raw[i]) for i, u in enumerate(updates)]
        if self.settings.rescale == "kl-clip":
            clip, rates = self.settings.at("kl_clip", self._step), self._rates(lr)
            grad_scale = getattr(self._optimizer, "grad_scale", None)
            factor = run.kl_scale(layers, updates, rates, clip, grad_scale, sane)
            self._device["clip_factor"] = factor
            self._count("clipped_steps", factor < 1)
            scales = torch.where(sane, factor, 1.0)
        else:
            scales = run.scales(self.settings.rescale, before, after, sane)
        loss_scale = getattr(self._optimizer, "grad_scale", None)  # a fused optimizer has yet to divide by it
        divisor = 1.0 if loss_scale is None else loss_scale.to(device)
        self._device["grad_norm"] = before.square().sum().sqrt() / divisor
        self._device["update_norm"] = (after * scales).square().sum().sqrt() / divisor
        for i, layer in enumerate(layers):
            for parameter, part in split_grad(layer, updates[i] * scales[i].to(updates[i])):
                assert parameter.grad is not None
                parameter.grad.copy_(part)

    # --- small helpers -------------------------------------------------------------------------------------

    def _parameters(self) -> list[Tensor]:
        """What the coming step will update."""
        if self._optimizer is None:
            return list(self._model.parameters())
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _rates(self, lr: float | None) -> dict[int, Any]:
        """Learning rates by the parameters' ids."""
        if self._optimizer is not None:
            return {id(p): group["lr"] for group in self._optimizer.param_groups for p in group["params"]}
        if lr is None:
            raise ValueError('rescale="kl-clip" needs the learning rate: call kfac.step(lr=...)')
        return {id(p): lr for p in self._model.parameters()}

    def _count(self, name: str, happened: Tensor) -> None:
        count = happened.to(torch.float32)
        self._device[name] = count + self._device[name].to(count.device) if name in self._device else count

    def _publish_bases(self) -> None:
        """Let the tape measure EKFAC's moments in the bases now in use."""
        if self.settings.curvature != "ekfac":
            return
        self._tape.bases = {
            layer.name: basis
            for layer in self.layers
            if layer.kind in ("linear", "conv", "conv1d-transposed")
            and layer.name not in self._tape.without_moments
            and (basis := self._states[layer.name].basis()) is not None
        }

    def _check_scaler(self) -> None:
        if not self._probe.has_scaler and getattr(self._optimizer, "grad_scale", None) is not None:
            raise RuntimeError(
                "a GradScaler steps this optimizer: pass KFAC(..., grad_scaler=scaler), so that the loss scale does "
                "not enter the statistics"
            )
