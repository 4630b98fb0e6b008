"""Run a study in several processes on one device, within a time limit.

An interrupted study can be continued: runs in ``known``, from an earlier result file, are not repeated. Each run is
appended to ``OUT.lines`` when it ends, in case the study is stopped early.
"""

import gc
import json
import pathlib
import queue
import time
from collections.abc import Callable

import torch
import torch.multiprocessing as mp


def work(tasks, results, data, device: str, train) -> None:
    torch.set_num_threads(1)
    while (config := tasks.get()) is not None:
        try:
            results.put(train(config, data, device))
        except Exception as error:
            results.put({"config": config, "error": f"{type(error).__name__}: {error}"})
        gc.collect()
        torch.cuda.empty_cache()  # the device is shared


def lines_of(path: str) -> pathlib.Path:
    return pathlib.Path(path + ".lines")


def known_runs(path: str) -> list[dict]:
    """Return the finished runs of a file, and of the lines beside it, that may not be there yet."""
    file, lines = pathlib.Path(path), lines_of(path)
    found = json.loads(file.read_text())["runs"] if file.exists() else []
    for line in lines.read_text().splitlines() if lines.exists() else ():
        if (run := json.loads(line)) not in found:
            found.append(run)
    return [run for run in found if "error" not in run]


class Machine:
    def __init__(
        self, data, train, workers: int, seconds: float, known: list[dict] = (), lines: pathlib.Path | None = None,
        device: str | None = None,
    ) -> None:  # fmt: skip
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        context = mp.get_context("spawn")
        self._tasks, self._results = context.Queue(), context.Queue()
        self._end = time.perf_counter() + seconds
        self.runs, self._lines = list(known), lines
        args = (self._tasks, self._results, data, self.device, train)
        self._processes = [context.Process(target=work, args=args, daemon=True) for _ in range(workers)]
        for process in self._processes:
            process.start()

    def run(self, configs: list[dict]) -> bool:
        """Train what was not trained yet; returns whether all of it is done."""
        return self.follow(lambda runs: configs)

    def follow(self, wanted: Callable[[list[dict]], list[dict]], grace: float = 0.0) -> bool:
        """Train what ``wanted`` returns for the runs so far, until that is nothing new; returns whether all is done.

        After the time limit no run begins; those under way have ``grace`` seconds to end.
        """
        under_way: list[dict] = []
        while True:
            done, now = [run["config"] for run in self.runs], time.perf_counter()
            waiting = [config for config in wanted(self.runs) if config not in done]
            free = len(self._processes) - len(under_way) if now < self._end else 0
            for config in [config for config in waiting if config not in under_way][:free]:
                self._tasks.put(config)
                under_way.append(config)
            if not under_way or now >= self._end + grace:
                return not waiting
            try:
                run = self._results.get(timeout=2)
            except queue.Empty:
                if not any(process.is_alive() for process in self._processes):
                    raise SystemExit("all processes that train have died") from None
                if 0 < sum((process.exitcode or 0) < 0 for process in self._processes) >= len(under_way):
                    return False  # what is under way was lost with processes that were killed
                continue
            under_way.remove(run["config"])
            self.runs.append(run)
            if self._lines is not None:
                with self._lines.open("a") as file:
                    file.write(json.dumps(run) + "\n")
            c = {k: v for k, v in run["config"].items() if k not in ("kfac", "size", "options")}
            figures = [f"{run[name]:.4f}" for name in ("validation", "test", "loss", "error_rate") if name in run]
            told = run.get("error") or f"{' '.join(figures)} {run.get('seconds', 0):.0f} s"
            print(*(f"{k}={v}" for k, v in c.items()), told, flush=True)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
