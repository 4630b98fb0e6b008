"""``dkfac run``: run an unmodified training script with K-FAC.

Input: a script and settings. Output: the script's exit status, or 3 if K-FAC was not attached. Owns: nothing.
"""

from __future__ import annotations

import argparse
import ast
import os
import runpy
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args


def add_run_command(commands: Any) -> None:
    from dkfac.config.settings import Strategy
    from dkfac.tools.settings_table import help_lines

    about = (
        "Runs a script and attaches K-FAC to its model and optimizer at the first training forward pass. Under "
        "torchrun: torchrun --nproc-per-node N -m dkfac run train.py ARGUMENTS"
    )
    parser = commands.add_parser(
        "run",
        help="run an unmodified training script with K-FAC",
        description=textwrap.fill(about, 100),
        epilog=help_lines(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--strategy", choices=get_args(Strategy), help="how work is distributed under torch.distributed")
    add("--damping", type=float, help="damping added to the curvature")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any setting listed below; can be repeated",
    )
    add("--target", help="for a script with several optimizers: the number of one, or its class or its model's class")
    add("script", type=Path, help="the script, followed by its own arguments")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_check)


def _check(given: argparse.Namespace) -> Callable[[], int]:
    """Check the options and return a function that runs the script."""
    if not given.script.is_file():
        raise ValueError(f"there is no script {given.script}")
    options = read_options(given)
    return lambda: _run_script(given, options)


def _run_script(given: argparse.Namespace, options: dict[str, Any]) -> int:
    from dkfac.tools.cli.watch import ScriptWatcher, say

    sys.argv = [str(given.script), *given.arguments]
    sys.path[0] = str(given.script.resolve().parent)
    with ScriptWatcher(options, given.target) as watch:
        try:
            runpy.run_path(os.path.abspath(given.script), run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
    missed = watch.last_word()
    if missed is None:
        return 0
    if int(os.environ.get("RANK", "0")) == 0:
        say(f"K-FAC was not attached: {missed}")
    return 3


def read_options(given: argparse.Namespace, others: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the settings of ``--set``, checked in combination with ``others``, the settings that they are added to."""
    from dkfac.config.experimental import ExperimentalSettings, move_old_keywords
    from dkfac.config.row import rows_by_name
    from dkfac.config.settings import Settings

    rows, extra = rows_by_name(Settings), rows_by_name(ExperimentalSettings)
    options: dict[str, Any] = {}
    for text in given.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: use NAME=VALUE, for example --set inverse_interval=50")
        group, _, inner = name.rpartition(".")
        own = (extra if group == "experimental" else rows | extra).get(inner)
        read = read_value(value, is_flag=own is not None and own.kind == "flag")
        if group == "experimental":
            name, read = group, {inner: read}
        if name == "experimental" and isinstance(read, dict):  # earlier options take precedence, then the recipe's
            read = {**others.get(name, {}), **read, **options.get(name, {})}
        options[name] = read
    for name in ("strategy", "damping"):
        if getattr(given, name) is not None:
            options[name] = getattr(given, name)
    options = move_old_keywords(options)
    unknown = [name for name in options if name not in rows]
    if unknown:
        raise ValueError(f"--set {unknown[0]}: K-FAC has no such setting; the settings are {', '.join(sorted(rows))}")
    Settings(**{**others, **options})
    return options


def read_value(text: str, *, is_flag: bool) -> Any:
    """Return the text as a Python literal, or unchanged if it is none. Flags may be spelled ``true`` and ``false``."""
    text = text.capitalize() if is_flag else text
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
