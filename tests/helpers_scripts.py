"""Run scripts in forks of a process that has imported torch and dkfac, which takes longer than most scripts.

A request is a JSON object on a line of stdin: the folder to run in, and a command line of Python, as ``["train.py"]``,
``["-m", "dkfac", "run", "train.py"]``. The answer is the exit status; stdout and stderr are files in the folder.
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

    def run(self, folder, *command):
        """Run a command line of Python in a folder."""
        self._process.stdin.write(json.dumps({"folder": str(folder), "command": [str(c) for c in command]}) + "\n")
        self._process.stdin.flush()
        status = int(self._process.stdout.readline())
        out, err = ((Path(folder) / name).read_text() for name in ("stdout.txt", "stderr.txt"))
        return SimpleNamespace(returncode=status, stdout=out, stderr=err)

    def close(self):
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def _execute(command):
    """Do what ``python COMMAND`` does; returns the exit status."""
    try:
        if command[0] == "-m":
            sys.argv, sys.path[0] = command[1:], os.getcwd()
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = command, os.path.dirname(command[0])
            runpy.run_path(command[0], run_name="__main__")
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
            sys.exit(_execute(request["command"]))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
