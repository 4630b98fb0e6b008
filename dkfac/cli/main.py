"""The command line: ``dkfac measure``, ``plan`` and ``run``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from dkfac.cli import measure, plan, run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; wrong input ends in one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="dkfac", description="Distributed K-FAC for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True)
    measure.add_to(commands)
    plan.add_to(commands)
    run.add_to(commands)
    given = parser.parse_args(arguments)
    try:
        status: int | Callable[[], int] = given.run(given)
    except (ValueError, OSError) as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"dkfac {given.command}: {error}", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else status()  # a script's own errors are its own


if __name__ == "__main__":
    sys.exit(main())
