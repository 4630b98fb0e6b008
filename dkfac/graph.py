"""A step's own arithmetic as CUDA graphs, for models whose steps are launches more than work.

Gradients are copied into buffers that stay, the graphs turn them into updates there, and they are copied back. A graph
is captured again when a buffer, a decomposition or a setting in it is another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dkfac import reduce, stages
from dkfac.ops.fused import finish_
from dkfac.ops.precision import tf32
from dkfac.replay import Captured
from dkfac.stacks import Stack, write_back
from dkfac.waiting import Call
from dkfac.window import Measured, Sums

if TYPE_CHECKING:
    from dkfac.run import Runner

LARGE = 2**22
"""Elements of a gradient of no layer's from which on it is not copied but looked at where it is."""


class StatisticsGraph:
    """The factors of a measured step from copies of what its calls left."""

    def __init__(self) -> None:
        self._captured, self._late = Captured(), Captured()
        self._late_good: Tensor | None = None
        self._form: Any = None
        self._copies: list[Tensor] = []
        self._good: Tensor | None = None

    def average(self, runner: Runner, measured: Measured, good: Tensor, decay: float) -> Tensor | None:
        """Absorb what a step measured; returns whether it was good, None if it cannot be done this way."""
        waiting = runner.tape.waiting
        calls = waiting.take()
        scale = reduce.scale_alone(runner, measured)
        spoilt = next((call.layer.name for call in calls if not call.is_intact), None)
        if spoilt is not None:
            runner.tape.stop_waiting(spoilt)
            for sums in measured.layers.values():
                sums.factors.clear()
            return None
        summed = any(s.factors or s.moments is not None for s in measured.layers.values())
        if isinstance(scale, Tensor) or any(isinstance(s.rows, Tensor) for s in measured.layers.values()):
            runner.tape.guarded(lambda: waiting.sum(calls))
            return None
        if summed or not calls:
            runner.tape.guarded(lambda: waiting.sum(calls))
            return self._average_late(runner, measured, good, decay, scale)
        form = tuple((c.layer.name, c.alike, c.x.stride(), c.g.stride()) for c in calls)
        originals = [t for call in calls for t in (call.x, call.g)]
        if form != self._form:
            self._form, self._good = form, good.clone()
            self._copies = [torch.empty_like(t) for t in originals]
        torch._foreach_copy_(self._copies, originals)
        assert self._good is not None
        flag = self._good.copy_(good)
        pairs = list(zip(self._copies[::2], self._copies[1::2], strict=True))

        def absorb() -> dict[str, Tensor]:
            sums = {name: Sums(calls=s.calls) for name, s in measured.layers.items()}
            static = [Call(c.layer, sums[c.layer.name], x, g, c.alike) for c, (x, g) in zip(calls, pairs, strict=True)]
            waiting.sum(static)
            fresh = Measured(sums, measured.terms, measured.num_passes, measured.unit)
            return {"good": reduce.absorb_alone(runner, fresh, flag, decay)}

        running = [average.value for la in runner.layers for average in runner.states[la.name].running.values()]
        key = [*runner.stacks, *running, flag, *self._copies, (form, scale, decay, measured.num_passes)]
        return self._captured.run(key, absorb, good.device)["good"]

    def _average_late(
        self, runner: Runner, measured: Measured, good: Tensor, decay: float, scale: float
    ) -> Tensor | None:
        """Absorb sums that were made in the backward pass, from a graph if they lie where they lay before."""
        if any(s.moments is not None for s in measured.layers.values()):
            return None
        if self._late_good is None:
            self._late_good = good.clone()
        flag = self._late_good.copy_(good)
        places = tuple((name, s.rows, *((k, t.data_ptr()) for k, t in s.factors.items()))
                       for name, s in measured.layers.items())  # fmt: skip
        running = [average.value for la in runner.layers for average in runner.states[la.name].running.values()]
        key = [*runner.stacks, *running, flag, (places, scale, decay)]
        return self._late.run(key, lambda: {"good": reduce.absorb_alone(runner, measured, flag, decay)}, good.device)[
            "good"
        ]


class StepGraph:
    """The buffers of a step, and its two halves: are the gradients finite, and what are the updates?"""

    def __init__(self) -> None:
        self._norms, self._updates = Captured(), Captured()
        self._others: list[Tensor] = []
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._large: list[Tensor] = []
        self._good: Tensor | None = None
        self._before: Tensor | None = None

    def begin(self, runner: Runner, parameters: list[Tensor], optimizer: Any) -> Tensor | None:
        """Read the gradients; returns whether they are finite, or None if a layer has none."""
        if any(layer.weight.grad is None for layer in runner.layers):
            return None
        stacks, device = runner.stacks, runner.stacks[0].device
        self._read_others(runner, parameters, device)
        for stack in stacks:
            stack.read()
        flat = self._flat
        assert flat is not None

        def norms() -> dict[str, Tensor]:
            before = torch.cat([stack.norms(stack.buffer) for stack in stacks])
            rest = torch.linalg.vector_norm(flat) if len(flat) else flat.new_zeros(())
            return {"before": before, "good": torch.isfinite(before).all() & torch.isfinite(rest)}

        found = self._norms.run([*stacks, flat], norms, device)
        if self._good is None or self._before is None or self._before.shape != found["before"].shape:
            self._good, self._before = found["good"].clone(), found["before"].clone()
        self._before.copy_(found["before"])
        good = found["good"]
        if self._large:
            good = (
                good & torch.isfinite(stages.norms([p.grad for p in self._large if p.grad is not None], device)).all()
            )
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            good = good & (found_inf.to(device).reshape(()) == 0)
        return self._good.copy_(good)

    def _read_others(self, runner: Runner, parameters: list[Tensor], device: torch.device) -> None:
        """Copy the small gradients of no layer's into one buffer."""
        mine = {id(p) for layer in runner.layers for p in layer.parameters()}
        rest = [p for p in parameters if p.grad is not None and id(p) not in mine]
        small = [p for p in rest if p.numel() < LARGE and p.dtype == torch.float32 and p.device == device
                 and p.grad is not None and not p.grad.is_sparse]  # fmt: skip
        chosen = {id(p) for p in small}
        self._large = [p for p in rest if id(p) not in chosen]
        if self._flat is None or len(small) != len(self._others) or any(map(_differ, small, self._others)):
            self._others = small
            self._flat = torch.zeros(sum(p.numel() for p in small), device=device)
            parts = torch.split(self._flat, [p.numel() for p in small]) if small else ()
            self._views = [part.view(p.shape) for p, part in zip(small, parts, strict=True)]
        if small:
            torch._foreach_copy_(self._views, stages.gradients(small))

    def finish(self, runner: Runner, loss_scale: Any) -> bool:
        """Turn the gradients read into updates and write them; False if not all layers can go together."""
        stacks, flat, good, before = runner.stacks, self._flat, self._good, self._before
        joined = [stack.decompositions(runner.states) for stack in stacks]
        if not all(stages.is_ready(layer, runner.states[layer.name]) for layer in runner.layers):
            return False
        if any(d is None or not stages.is_uniform(d, runner.settings) for d in joined):
            return False
        assert flat is not None
        assert good is not None
        assert before is not None
        damping = stages.damping_values(runner.settings, runner.step)
        objects: list[Any] = [d for found in joined if found is not None for d in found.values()]
        if runner.settings.damping_mode == "relative":
            objects += [mean for layer in runner.layers for mean in runner.states[layer.name].means.values()]

        def updates() -> dict[str, Tensor]:
            flat.masked_fill_(~good, 0)
            return update_in_place(runner, stacks, before, good)

        with tf32(runner.settings.tf32, flat.device):
            norms = self._updates.run([*stacks, *objects, flat, good, before, damping], updates, flat.device)
        divisor = 1.0 if loss_scale is None else loss_scale.to(flat.device)
        runner.device |= {name: norm / divisor for name, norm in norms.items()}
        if self._others:
            torch._foreach_copy_(stages.gradients(self._others), self._views)
        stages.zero_where(~good, stages.gradients(self._large))
        write_back(stacks)
        return True


def look_at_gradients(
    runner: Runner, optimizer: Any, parameters: list[Tensor], device: torch.device
) -> tuple[stages.Norms | None, Tensor]:
    """Return the gradients' norms, None where a graph has them, and whether they are finite."""
    if runner.uses_graphs:
        good = runner.graph.begin(runner, parameters, optimizer)
        if good is not None:
            return None, good
    norms = stages.Norms(parameters, device)
    return norms, norms.are_finite(getattr(optimizer, "found_inf", None))


def wants_graphs(runner: Runner) -> bool:
    """Whether a step is to be taken from graphs: they are asked for, and there is one process with one GPU."""
    devices = {layer.weight.device for layer in runner.layers}
    one = len(devices) == 1 and next(iter(devices)).type == "cuda"
    return runner.settings.cuda_graph and runner.exchange is None and one


def _differ(one: Tensor, other: Tensor) -> bool:
    return one is not other


def update_in_place(runner: Runner, stacks: list[Stack], before: Tensor, good: Tensor) -> dict[str, Tensor]:
    """Turn the gradients in the stacks' buffers into updates; returns the norms before and after."""
    found = [(stack, stages.directions(stack, runner, stack.buffer)) for stack in stacks]
    after = torch.cat([stack.norms(update) for stack, update in found])
    sane = torch.isfinite(after)
    after = torch.where(sane, after, before)
    scales = stages.scales(runner.settings.rescale, before, after, sane)
    begin = 0
    for stack, update in found:
        here, flat = slice(begin, begin := begin + len(stack)), (len(stack), -1)
        finish_(stack.buffer.view(flat), update.view(flat), scales[here], sane[here], good)
    return {"grad_norm": before.square().sum().sqrt(), "update_norm": (after * scales).square().sum().sqrt()}
