"""Progress bars on stderr: only where a person is looking, unless asked for."""
from __future__ import annotations

import sys


class ProgressBar:
    """A context manager around one `rich` bar.

    Args:
      what: the word beside it.
      total: steps in all; may change with `update`.
      is_shown: True or False, None: on an interactive terminal or in a notebook.
    """

    def __init__(self, what: str, total: int = 0, *, is_shown: bool | None = None):
        self.total = total
        self._what = what
        self._is_shown = _is_interactive() if is_shown is None else is_shown
        self._progress = None
        self._task = None

    def __enter__(self) -> ProgressBar:
        if self._is_shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                                      TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(self._what, total=self.total or None)
            self._progress.start()
        return self

    def update(self, done: int, total: int) -> None:
        """Sets how far the work is."""
        self.total = total
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total)

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def _is_interactive() -> bool:
    return sys.stderr.isatty() or hasattr(sys, "ps1") or _is_in_notebook()


def _is_in_notebook() -> bool:
    """Whether this code runs in a notebook's kernel: many libraries import ipykernel without one."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None
