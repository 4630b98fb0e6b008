"""The command ``dkfac``.

Input: arguments of the command line. Output: the exit status; wrong input is one line on stderr. Owns: the parser.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import dkfac
from dkfac.tools.cli import compare, doctor, measure, plan, report, run, selftest, simulate, train


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the closest option for an unknown one."""

    words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if message.startswith("unrec") else ""
        known = [option for action in self._known_actions() for option in action.option_strings]
        near = difflib.get_close_matches(unknown.partition("=")[0], known, 1) if unknown.startswith("--") else []
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(choice[1], [word.strip("'") for word in choice[2].split(", ")], 1)
        super().error(f"{message}; did you mean {near[0]}?" if near else message)

    def _known_actions(self) -> list[argparse.Action]:
        """Return the actions of this parser and of the subcommand in use."""
        found = list(self._actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                given = [name for name in self.words if name in action.choices][:1]
                found += [inner for name in given for inner in action.choices[name]._actions]
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status. Wrong input prints one line to stderr and returns 2."""
    parser = Parser(prog="dkfac", description="Distributed K-FAC for PyTorch.")
    parser.add_argument("--version", action="version", version=f"dkfac {dkfac.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    train.add_train_command(commands)
    compare.add_compare_command(commands)
    report.add_report_command(commands)
    measure.add_measure_command(commands)
    plan.add_plan_command(commands)
    run.add_run_command(commands)
    simulate.add_simulate_command(commands)
    doctor.add_doctor_command(commands)
    selftest.add_selftest_command(commands)
    parser.words = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(arguments)
    try:
        status: int | Callable[[], int] = given.run(given)
        if not isinstance(status, int) and given.command != "run":  # errors of the user's script are not caught here
            status = status()
    except BrokenPipeError:  # the reader of stdout closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"dkfac {given.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"dkfac {given.command}: interrupted", file=sys.stderr)
        return 130
    return status if isinstance(status, int) else status()


if __name__ == "__main__":
    sys.exit(main())
