"""Run scripts in forks of a process that has imported torch and dkfac, which takes longer than most scripts.

A request is a JSON object on a line of stdin: the folder to run in, and a command line of Python, as ``["train.py"]``,
``["-m", "dkfac", "run", "train.py"]``. The answer is the exit status; stdout and stderr are files in the folder, and
with ``watched`` a hash of the trained models. ``after``: see ``helpers_resume``.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[1]


class Forks:
    """The process that forks."""

    def __init__(self):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DKFAC_RUN_PATIENCE": "60"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen([sys.executable, __file__], **pipes, env=environment, text=True)

    def run(self, folder, *command, watched=False, after=None):
        """Run a command line of Python in a folder."""
        request = {"folder": str(folder), "command": [str(c) for c in command], "watched": watched, "after": after}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        out, err = ((Path(folder) / name).read_text() for name in ("stdout.txt", "stderr.txt"))
        path = Path(folder) / "digest.txt"
        digest, done = path.read_text().split() if path.exists() else (None, 0)
        return SimpleNamespace(returncode=status, stdout=out, stderr=err, digest=digest, num_interrupted=int(done))

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def execute(command, *, watched=True, after=None):
    """Do what ``python COMMAND`` does; returns the exit status."""
    if not watched:
        return _run(command)
    from helpers_resume import Interruption

    folder, interruption = os.getcwd(), Interruption(after, through_run=command[:3] == ["-m", "dkfac", "run"])
    status = _run(command)
    Path(folder, "digest.txt").write_text(f"{interruption.digest()} {len(interruption.done)}")
    return status


def _run(command):
    try:
        if command[0] == "-m":
            sys.argv, sys.path[0] = command[1:], os.getcwd()
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            path = os.path.abspath(command[0])  # processes that it spawns would look in the folder of this one
            sys.argv, sys.path[0] = command, os.path.dirname(path)
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _serve():
    for name in ("torch._dynamo", "torch.distributed.tensor", "torch.utils.data", "dkfac.tools.cli.main",
                 "dkfac.tools.cli.watch", "dkfac.tools.settings_table"):  # fmt: skip
        importlib.import_module(name)

    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(request["folder"])
            for number, name in ((0, os.devnull), (1, "stdout.txt"), (2, "stderr.txt")):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
            sys.exit(execute(request["command"], watched=request["watched"], after=request["after"]))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
