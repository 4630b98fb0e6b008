"""``dkfac run``: run an unmodified training script with K-FAC.

Input: a script and settings. Output: the script's exit status; with ``--strict`` 3 if K-FAC was not attached. Owns:
nothing.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
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
        "Runs a script and attaches K-FAC to each of its optimizers and the model that it trains, at the first "
        "training forward pass. Where that is not possible, a line says why and the script goes on without K-FAC. "
        "Under torchrun: torchrun --nproc-per-node N -m dkfac run train.py ARGUMENTS"
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
    add("--target", help="attach to one of several optimizers only: its number, its class or its model's class")
    add("--strict", action="store_true", help="end the script with status 3 where K-FAC cannot be attached")
    add(
        "--save",
        action="store_true",
        help="save K-FAC's state beside the script's file of the optimizer's state, as FILE.dkfac, and load it again",
    )
    add("-m", dest="module", action="store_true", help="run a module, as python -m does: dkfac run -m package.train")
    add("script", help="the script, followed by its own arguments")
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=_check)


def _check(given: argparse.Namespace) -> Callable[[], int]:
    """Check the options and return a function that runs the script."""
    if not given.module and not Path(given.script).is_file():
        raise ValueError(f"there is no script {given.script}")
    if given.module:
        sys.path[0] = os.getcwd()
        if _find(given.script) is None:
            raise ValueError(f"there is no module {given.script}; it is searched for in this folder and on PYTHONPATH")
    options = read_options(given)
    return lambda: _run_script(given, options)


def _find(module: str) -> Any:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None


def _run_script(given: argparse.Namespace, options: dict[str, Any]) -> int:
    from dkfac.tools.cli.watch import Refused, ScriptWatcher

    sys.argv = [given.script, *given.arguments]
    status: Any = 0
    with ScriptWatcher(options, given.target, strict=given.strict, save=given.save) as watch:
        try:
            if given.module:
                runpy.run_module(given.script, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = str(Path(given.script).resolve().parent)
                runpy.run_path(os.path.abspath(given.script), run_name="__main__")
        except Refused as reason:
            print(reason.code, file=sys.stderr)
            return 3
        except SystemExit as end:
            status = end.code
    missed = watch.last_word()
    if missed is not None:
        watch.say(f"K-FAC was not attached: {missed}")
    if status not in (None, 0):
        raise SystemExit(status)
    return 3 if given.strict and watch.optimizer is None and not watch.has_children else 0


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
