"""Run a user's script once for ``dkfac compare --script`` (``script.py``) and record its losses.

Input: a task as a dict. Output: a run folder and an exit status. Owns: its patches of ``Tensor.backward``,
``GradScaler.scale`` and ``dkfac.KFAC``; the process ends with the run.
"""

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
"""Exit statuses of a run that has printed its own error message."""


class LastStepTaken(SystemExit):
    """Ends the script after the last step."""


class StepRecorder:
    """Writes one entry for each optimizer step after a backward pass, and ends the script after the last step."""

    def __init__(self, file: Any, most: int) -> None:
        self._file, self._most = file, most
        self._losses: list[Any] = []
        self._scaled: tuple[Any, Any] = None, None
        """The last scaled loss of a GradScaler, and the unscaled loss."""
        self._begin: float | None = None
        self._depth = self.taken = 0
        self.device: Any = None

    def watch(self) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        backward, scale = torch.Tensor.backward, torch.amp.GradScaler.scale

        def recorded_scale(scaler: Any, outputs: Any) -> Any:
            found = scale(scaler, outputs)
            self._scaled = found, outputs
            return found

        def recorded_backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth == 0 and tensor.numel() == 1:
                self._begin = self._begin or time.perf_counter()  # do not time imports and data loading
                loss, self._scaled = self._scaled[1] if tensor is self._scaled[0] else tensor, (None, None)
                self._losses.append(loss.detach())
            self._depth += 1
            try:
                return backward(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]
            finally:
                self._depth -= 1

        torch.Tensor.backward = recorded_backward  # type: ignore[method-assign,assignment]
        torch.amp.GradScaler.scale = recorded_scale  # type: ignore[method-assign,assignment]
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
            raise LastStepTaken(0)

    def add(self, **entry: Any) -> None:
        from dkfac.tools.recipes.folder import to_json_value

        self._file.write(json.dumps(to_json_value(entry)) + "\n")


def record(task: dict[str, Any]) -> int:
    """Run the script into a run folder and return an exit status. The run without K-FAC checks that it could be
    attached."""
    import numpy as np
    import torch

    from dkfac.tools.cli.watch import ScriptWatcher

    torch.manual_seed(task["seed"])
    random.seed(task["seed"])
    np.random.seed(task["seed"] % 2**32)
    place, is_kfac = Path(task["folder"]), task["name"] == "kfac"
    about = {"recipe": task["script"], "arguments": task["arguments"], "hyper": {"seed": task["seed"]}, "world_size": 1,
             "num_steps": task["steps"], "kfac": task["options"] if is_kfac else None}  # fmt: skip
    _write(place / "settings.json", about)
    watch = ScriptWatcher(task["options"], task["target"], command="dkfac compare", strict=True, tries=not is_kfac)
    with open(place / "metrics.jsonl", "w", buffering=1) as file:
        steps = StepRecorder(file, task["steps"])
        steps.watch()
        _refuse_own_kfac()
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = _run_script(task, watch)
        if status in (0, STOPPED) and steps.taken:
            steps.add(kind="end", step=steps.taken, reason="SIGINT" if status else "done")
            _summarise(place, about, watch, steps.device)
    missed = watch.last_word() if status == 0 else None
    if missed is not None:
        print(f"dkfac compare: K-FAC cannot be attached: {missed}", file=sys.stderr)
        return WRONG
    return status


def _refuse_own_kfac() -> None:
    """Refuse a script that attaches K-FAC itself: the run without K-FAC would have it."""
    from dkfac import kfac
    from dkfac.tools.cli.watch import Refused

    class Own(kfac.KFAC):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise Refused("dkfac compare: the script attaches dkfac.KFAC itself: remove that line for a comparison")

    for module in (kfac, sys.modules["dkfac"]):
        setattr(module, "KFAC", Own)  # noqa: B010 - mypy refuses the assignment


def _run_script(task: dict[str, Any], watch: Any) -> int:
    """Return 0 if the script took its steps or exited normally; otherwise print the reason and return a status."""
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
    """Write the other files that ``dkfac report`` reads: settings, environment and summary."""
    from dkfac.tools.recipes.folder import describe_environment, peak_memory

    kfac = watch.attached
    summary: dict[str, Any] = {"peak_memory_bytes": peak_memory(device)}
    if kfac is not None:
        about["kfac"] = kfac.settings.describe()
        summary |= {"kfac": kfac.report(), "plan": json.loads(kfac.plan.to_json()), "layers": repr(kfac)}
    _write(place / "settings.json", about | {"optimizer": watch.optimizer})
    _write(place / "environment.json", describe_environment(device))
    _write(place / "summary.json", summary)


def _write(path: Path, body: Any) -> None:
    from dkfac.tools.recipes.folder import to_json_value

    path.write_text(json.dumps(to_json_value(body), indent=1, default=str) + "\n")
