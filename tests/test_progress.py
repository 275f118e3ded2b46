"""Progress bars: drawn only where a person is looking."""
from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from jradix.progress import ProgressBar


@pytest.mark.parametrize("shell, is_drawn", [
    (None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=object()), True)],
    ids=["imported only", "IPython without a terminal", "notebook"])
def test_a_bar_is_drawn_in_a_kernel_not_where_one_was_imported(shell: object, is_drawn: bool,
                                                               monkeypatch: pytest.MonkeyPatch,
                                                               capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with ProgressBar("requests", 2) as bar:
        bar.update(1, 2)
    assert (capsys.readouterr().err != "") == is_drawn


def test_an_asked_bar_is_drawn_anywhere(capsys: pytest.CaptureFixture) -> None:
    with ProgressBar("requests", 2, is_shown=True):
        pass
    assert capsys.readouterr().err != ""
