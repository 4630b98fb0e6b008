"""The settings as text: the tables of docs/settings.md and the help of the command line.

``python -m dkfac.tools.settings_table docs/settings.md`` writes the tables.

Input: the declared rows of all settings and the restrictions. Output: markdown and plain text. Owns: the part of
docs/settings.md between the two marks.
"""

from __future__ import annotations

import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

from dkfac.config.experimental import ExperimentalSettings
from dkfac.config.restrictions import RESTRICTIONS
from dkfac.config.row import SettingRow, Topic
from dkfac.config.settings import Settings

TABLE_BEGIN, TABLE_END = (f"<!-- written by dkfac.tools.settings_table: {word} -->" for word in ("begin", "end"))


def declared() -> list[tuple[str, object, SettingRow]]:
    """Return name, default and row of each setting, sorted by topic."""
    found = [(f.name, f.default, f.metadata["row"]) for f in fields(Settings) if f.name != "experimental"]
    found += [(f"experimental.{f.name}", f.default, f.metadata["row"]) for f in fields(ExperimentalSettings)]
    return sorted(found, key=lambda setting: get_args(Topic).index(setting[2].topic))


def shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def values(row: SettingRow) -> str:
    """Return the allowed values as short text."""
    if row.kind == "choice":
        listed = [shown(choice) for choice in row.choices]
        allowed = ", ".join([*listed, *([f"an integer >= {row.low:g}"] if row.low >= 0 else [])])
    else:
        allowed = row.allowed.removeprefix("one of ").replace("'", '"')
    return allowed + (", or None" if row.optional and "None" not in allowed else "")


def markdown() -> str:
    """Return the tables of docs/settings.md."""
    lines: list[str] = []
    topic = ""
    for name, default, row in declared():
        if row.topic != topic:
            topic = row.topic
            lines += [
                "",
                f"## {topic.capitalize()}",
                "",
                "| setting | default | values | meaning |",
                "|---|---|---|---|",
            ]
        lines.append(f"| `{name}` | {_code(shown(default))} | {_code(values(row))} | {row.help} |")
    lines += ["", "## Settings that cannot be combined", "", "| settings | message |", "|---|---|"]
    for restriction in RESTRICTIONS:
        where = "" if restriction.where == "always" else f" ({restriction.where})"
        message = re.sub(r"\{s\.[^}]*\}", "...", restriction.message).replace("{{...}}", "{...}")
        lines.append(f"| {', '.join(f'`{name}`' for name in restriction.names)}{where} | {message} |")
    return "\n".join(lines).strip()


def _code(text: str) -> str:
    """Return the text with quoted values formatted as code."""
    return re.sub(r'"[\w-]+"', r"`\g<0>`", text)


def help_lines() -> str:
    """Return one line for each setting: its default and the allowed values."""
    lines = ["settings for --set (default; values):"]
    width = max(len(name) for name, *_ in declared())
    topic = ""
    for name, default, row in declared():
        if row.topic != topic:
            topic = row.topic
            lines.append(f" {topic}")
        lines.append(f"  {name:{width}}  {shown(default)}; {values(row)}")
    return "\n".join([*lines, "docs/settings.md explains each setting"])


def updated(page: str) -> str:
    """Return a page with the text between the marks replaced by the current tables."""
    return f"{page[: page.index(TABLE_BEGIN)]}{TABLE_BEGIN}\n{markdown()}\n{page[page.index(TABLE_END) :]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(updated(path.read_text()))
