"""Run a study in several processes on one device, within a time limit.

An interrupted study can be continued: runs in ``known``, from an earlier result file, are not repeated. Each run is
appended to ``OUT.lines`` when it ends, in case the study is stopped early.
"""

import gc
import json
import pathlib
import queue
import time

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
        self, data, train, workers: int, seconds: float, known: list[dict] = (), lines: pathlib.Path | None = None
    ) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
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
        done = [run["config"] for run in self.runs]
        waiting = [config for config in configs if config not in done]
        for config in waiting:
            self._tasks.put(config)
        while waiting and time.perf_counter() < self._end:
            try:
                run = self._results.get(timeout=2)
            except queue.Empty:
                if not any(process.is_alive() for process in self._processes):
                    raise SystemExit("all processes that train have died") from None
                continue
            self.runs.append(run)
            if self._lines is not None:
                with self._lines.open("a") as file:
                    file.write(json.dumps(run) + "\n")
            waiting.remove(run["config"])
            c = {k: v for k, v in run["config"].items() if k != "kfac"}
            told = run.get("error") or f"{run['validation']:.4f} {run['test']:.4f} {run['seconds']:.0f} s"
            print(*(f"{k}={v}" for k, v in c.items()), told, flush=True)
        return not waiting

    def close(self) -> None:
        for process in self._processes:
            process.kill()
