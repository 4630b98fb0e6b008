"""``dkfac run``: add K-FAC to a training script that knows nothing of it."""

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


def add_to(commands: Any) -> None:
    from dkfac.config.settings import Strategy
    from dkfac.tools.settings_table import help_lines

    about = (
        "Runs a script and adds K-FAC where its model first trains with the optimizer it built. Under "
        "torchrun: torchrun --nproc-per-node N -m dkfac run train.py arguments of the script"
    )
    parser = commands.add_parser(
        "run",
        help="add K-FAC to a training script that knows nothing of it",
        description=textwrap.fill(about, 100),
        epilog=help_lines(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--strategy", choices=get_args(Strategy), help="who does what under torch.distributed")
    add("--damping", type=float, help="added to the curvature")
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="any setting, below; may be given several times",
    )
    add("--target", help="with several optimizers: the number of one, or the class of an optimizer or model")
    add("script", type=Path, help="the script, followed by its own arguments")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> Callable[[], int]:
    """Return what runs the script, everything checked that can be before."""
    if not given.script.is_file():
        raise ValueError(f"there is no script {given.script}")
    options = read_options(given)
    return lambda: _run(given, options)


def _run(given: argparse.Namespace, options: dict[str, Any]) -> int:
    from dkfac.tools.cli.watch import Watch, say

    sys.argv = [str(given.script), *given.arguments]
    sys.path[0] = str(given.script.resolve().parent)
    with Watch(options, given.target) as watch:
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
    """Return K-FAC's settings, checked, together with ``others`` that they are added to, before the script starts."""
    from dkfac.config.experimental import ExperimentalSettings, move_old_keywords
    from dkfac.config.row import rows_by_name
    from dkfac.config.settings import Settings

    rows, extra = rows_by_name(Settings), rows_by_name(ExperimentalSettings)
    options: dict[str, Any] = {}
    for text in given.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set {text}: a setting is NAME=VALUE, as in --set inverse_interval=50")
        group, _, inner = name.rpartition(".")
        own = (extra if group == "experimental" else rows | extra).get(inner)
        read = read_value(value, is_flag=own is not None and own.kind == "flag")
        if group == "experimental":
            name, read = group, {inner: read}
        if name == "experimental" and isinstance(read, dict):  # what was said first holds, then the recipe's
            read = {**others.get(name, {}), **read, **options.get(name, {})}
        options[name] = read
    for name in ("strategy", "damping"):
        if getattr(given, name) is not None:
            options[name] = getattr(given, name)
    options = move_old_keywords(options)
    unknown = [name for name in options if name not in rows]
    if unknown:
        raise ValueError(f"--set {unknown[0]}: K-FAC has no such setting; it has {', '.join(sorted(rows))}")
    Settings(**{**others, **options})
    return options


def read_value(text: str, *, is_flag: bool) -> Any:
    """Return a Python value, or the text where it is none; flags may be spelled true and false."""
    text = text.capitalize() if is_flag else text
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
