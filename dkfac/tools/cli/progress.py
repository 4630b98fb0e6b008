"""Progress output of a run as plain lines.

Input: lines of text. Output: the lines on a stream. Owns: whether the last line on a terminal is still open.
"""

from __future__ import annotations

from typing import TextIO

BETWEEN = "at step "
"""How lines begin that are only worth reading while a run is under way: they are left out of files."""


class LinePrinter:
    """Prints lines. On a terminal, a line about a step overwrites the previous one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_terminal = stream, stream.isatty()
        self._open = False

    def say(self, line: str) -> None:
        between, passing = line.startswith(BETWEEN), line.startswith(("step ", BETWEEN))
        if not self._is_terminal:
            if not between:
                print(line, file=self._stream, flush=True)
            return
        end = "" if passing else "\n"
        begin = "\r\x1b[K" if self._open and passing else "\n" if self._open else ""
        print(f"{begin}{line}", end=end, file=self._stream, flush=True)
        self._open = passing

    def close(self) -> None:
        if self._open:
            print(file=self._stream)
            self._open = False
