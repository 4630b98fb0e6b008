"""The command line."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from dkfac.tools.cli import compare, doctor, measure, plan, report, run, simulate, train


class Parser(argparse.ArgumentParser):
    """Refuses what it does not know, with what may have been meant."""

    words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()[0] if message.startswith("unrec") else ""
        known = [option for action in self._known_actions() for option in action.option_strings]
        near = difflib.get_close_matches(unknown.partition("=")[0], known, 1) if unknown.startswith("--") else []
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(choice[1], [word.strip("'") for word in choice[2].split(", ")], 1)
        super().error(f"{message}; did you mean {near[0]}?" if near else message)

    def _known_actions(self) -> list[argparse.Action]:
        """Return those of the command that was given."""
        found = list(self._actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                given = [name for name in self.words if name in action.choices][:1]
                found += [inner for name in given for inner in action.choices[name]._actions]
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; wrong input ends in one line on stderr and exit status 2."""
    parser = Parser(prog="dkfac", description="Distributed K-FAC for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    train.add_to(commands)
    compare.add_to(commands)
    report.add_to(commands)
    measure.add_to(commands)
    plan.add_to(commands)
    run.add_to(commands)
    simulate.add_to(commands)
    doctor.add_to(commands)
    parser.words = sys.argv[1:] if arguments is None else arguments
    given = parser.parse_args(arguments)
    try:
        status: int | Callable[[], int] = given.run(given)
        if not isinstance(status, int) and given.command != "run":  # a script's own errors are its own
            status = status()
    except BrokenPipeError:  # whoever read what was printed has had enough
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
