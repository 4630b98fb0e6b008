"""Watch the processes that a script starts with ``multiprocessing``, as ``torch.multiprocessing.spawn`` does.

Input: a function that starts a watcher, and its options. Output: a watcher in each child. Owns: its patch of
``multiprocessing``'s ``start``.

A forked child has its parent's watcher. A spawned one gets its process object by pickle, and what is put into it here
starts a watcher where it is unpickled: before the child's own code, whatever the class of the process and its target.
Children that are started in another way (``subprocess``) are not watched: put ``dkfac run`` into their command line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from multiprocessing import process
from typing import Any

_LOADERS = "torch.utils.data"
_KEY = "_dkfac_watch"
StartWatching = Callable[[dict[str, Any]], None]


class WatchInChild:
    """An object that starts a watcher where it is unpickled."""

    def __init__(self, watch: StartWatching, options: dict[str, Any]) -> None:
        self._watch, self._options = watch, options

    def __reduce__(self) -> tuple[StartWatching, tuple[Any, ...]]:
        return self._watch, (self._options,)


@contextlib.contextmanager
def watched_children(watch: StartWatching, options: dict[str, Any], started: Callable[[], None]) -> Iterator[None]:
    """Within this context, children of ``multiprocessing`` watch what they train. ``started`` is called for each."""
    base: Any = process.BaseProcess
    start = base.start

    def watched_start(child: Any) -> None:
        module = getattr(getattr(child, "_target", None), "__module__", None) or ""
        if not module.startswith(_LOADERS):
            vars(child)[_KEY] = WatchInChild(watch, options)
            started()
        try:
            start(child)
        finally:
            vars(child).pop(_KEY, None)

    base.start = watched_start
    try:
        yield
    finally:
        base.start = start
