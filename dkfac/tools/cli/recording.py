"""One run of a user's script for ``dkfac compare --script`` (``script.py``): its losses, by step, into a run folder."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

RUNS = {"first-order": "without K-FAC", "kfac": "with K-FAC"}
FAILED, WRONG, STOPPED = 1, 2, 130
"""Statuses of a run that has said why itself."""


class Enough(SystemExit):
    """The last step was taken."""


class Steps:
    """Writes a line for each step that follows a backward pass, and ends the script at the last."""

    def __init__(self, file: Any, most: int) -> None:
        self._file, self._most = file, most
        self._losses: list[Any] = []
        self._scaled: tuple[Any, Any] = None, None
        """What a GradScaler made of a loss, and the loss."""
        self._begin: float | None = None
        self._depth = self.taken = 0
        self.device: Any = None

    def watch(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        backward, scale = torch.Tensor.backward, torch.amp.GradScaler.scale

        def told(scaler: Any, outputs: Any) -> Any:
            found = scale(scaler, outputs)
            self._scaled = found, outputs
            return found

        def noted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0 and tensor.numel() == 1:
                self._begin = self._begin or time.perf_counter()  # imports and data are not training
                loss, self._scaled = self._scaled[1] if tensor is self._scaled[0] else tensor, (None, None)
                self._losses.append(loss.detach())
            self._depth += 1
            try:
                return backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                self._depth -= 1

        torch.Tensor.backward = noted  # type: ignore[method-assign,assignment]
        torch.amp.GradScaler.scale = told  # type: ignore[method-assign,assignment]
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        if not self._losses or self._begin is None:
            return
        self.taken += 1
        self.device = self._losses[-1].device
        loss = statistics.fmean(float(tensor) for tensor in self._losses)
        self._losses.clear()
        self.add(kind="step", step=self.taken, seconds=time.perf_counter() - self._begin, loss=loss)
        if self.taken >= self._most:
            raise Enough(0)

    def add(self, **entry: Any) -> None:
        from dkfac.tools.recipes.folder import plain

        self._file.write(json.dumps(plain(entry)) + "\n")


def record(task: dict[str, Any]) -> int:
    """Run the script, with K-FAC or to see that it could have it, into a run folder; returns a status."""
    import numpy as np
    import torch

    from dkfac.tools.cli.watch import Watch

    torch.manual_seed(task["seed"])
    random.seed(task["seed"])
    np.random.seed(task["seed"] % 2**32)
    place, is_kfac = Path(task["folder"]), task["name"] == "kfac"
    about = {"recipe": task["script"], "arguments": task["arguments"], "hyper": {"seed": task["seed"]}, "world_size": 1,
             "num_steps": task["steps"], "kfac": task["options"] if is_kfac else None}  # fmt: skip
    _write(place / "settings.json", about)
    watch = Watch(task["options"], task["target"], command="dkfac compare", tries=not is_kfac)
    with open(place / "metrics.jsonl", "w", buffering=1) as file:
        steps = Steps(file, task["steps"])
        steps.watch()
        _refuse_own_kfac()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = _run(task, watch)
        if status in (0, STOPPED) and steps.taken:
            steps.add(kind="end", step=steps.taken, reason="SIGINT" if status else "done")
            _summarise(place, about, watch, steps.device)
    missed = watch.last_word() if status == 0 else None
    if missed is not None:
        print(f"dkfac compare: K-FAC cannot be attached: {missed}", file=sys.stderr)
        return WRONG
    return status


def _refuse_own_kfac() -> None:
    """Let a script that attaches K-FAC itself say so: neither run would be what it is called."""
    from dkfac import kfac
    from dkfac.tools.cli.watch import Refused

    class Own(kfac.KFAC):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise Refused("dkfac compare: the script attaches dkfac.KFAC itself: leave that out for a comparison")

    for module in (kfac, sys.modules["dkfac"]):
        setattr(module, "KFAC", Own)  # noqa: B010 - which a type checker would refuse


def _run(task: dict[str, Any], watch: Any) -> int:
    """Return 0 if the script took its steps or ended well; else a status, having said why."""
    from dkfac.tools.cli.watch import Refused

    sys.argv = [task["script"], *task["arguments"]]
    sys.path[0] = str(Path(task["script"]).resolve().parent)
    try:
        with watch:
            runpy.run_path(os.path.abspath(task["script"]), run_name="__main__")
    except KeyboardInterrupt:
        return STOPPED
    except Refused as reason:
        print(reason.code, file=sys.stderr)
        return WRONG
    except SystemExit as end:
        if end.code in (None, 0):
            return 0
        if not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        return _failed(task, end.code if isinstance(end.code, int) else 1)
    except Exception:
        sys.excepthook(*sys.exc_info())
        return _failed(task, 1)
    return 0


def _failed(task: dict[str, Any], status: int) -> int:
    where = f"in the run {RUNS[task['name']]}, see above"
    print(f"dkfac compare: the script ended with status {status} {where}", file=sys.stderr)
    return FAILED


def _summarise(place: Path, about: dict[str, Any], watch: Any, device: Any) -> None:
    """Write what ``dkfac report`` shows beside the steps."""
    from dkfac.tools.recipes.folder import environment, resources

    kfac = watch.attached
    summary: dict[str, Any] = {"peak_memory_bytes": resources(device)}
    if kfac is not None:
        about["kfac"] = kfac.settings.describe()
        summary |= {"kfac": kfac.report(), "plan": json.loads(kfac.plan.to_json()), "layers": repr(kfac)}
    _write(place / "settings.json", about | {"optimizer": watch.optimizer})
    _write(place / "environment.json", environment(device))
    _write(place / "summary.json", summary)


def _write(path: Path, body: Any) -> None:
    from dkfac.tools.recipes.folder import plain

    path.write_text(json.dumps(plain(body), indent=1, default=str) + "\n")
