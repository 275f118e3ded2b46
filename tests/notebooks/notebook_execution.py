"""Runs a notebook in a fresh kernel of the running interpreter, and says what keeps its file from being committed.

    python tests/notebooks/notebook_execution.py [notebooks/02_agents_react.ipynb ...]

executes the given notebooks, else all of them, and saves each with its outputs. They run in a temporary folder, so the
files that they write are not kept.
"""
from __future__ import annotations

import ast
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import nbformat
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets import default

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}
MAX_OUTPUT_BYTES, MAX_PICTURE_BYTES = 60_000, 40_000
PICTURES = ("image/png", "image/jpeg", "image/svg+xml")
CELL_TIMEOUT_S = 600
_ADDRESS = re.compile(r" at 0x[0-9a-f]+(?=>)")
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<])/(?:[\w.~-]+/)+[\w.~-]+|\b[A-Z]:\\\w+|(?<![\w/])~/[\w.]+")
_INSTALL_LINE = "# Installs what is missing"
_NO_WIDGETS = "ignore:IProgress not found"      # of tqdm, which the tokenizer brings; its message has the path of a file


class _RunningInterpreter(KernelSpecManager):
    """Knows one kernel, whatever is installed for the user: that of the Python which runs this."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        return KernelSpec(**get_kernel_dict())


class _Kernel(AsyncKernelManager):
    @default("kernel_spec_manager")
    def _running_interpreter(self) -> KernelSpecManager:
        return _RunningInterpreter(parent=self)


def execute(path: Path, folder: Path, environment: Mapping[str, str] | None = None) -> NotebookNode:
    """Runs all cells in order and returns the notebook with their outputs; the file stays as it is.

    Args:
      path: the notebook.
      folder: where the kernel runs and the notebook's files go.
      environment: variables of the kernel beside those of this process.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised; the message has its code and the traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]      # also where jradix is not installed
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT_S, kernel_manager_class=_Kernel, coalesce_streams=True,
                            resources={"metadata": {"path": str(folder)}})
    client.execute(env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": _NO_WIDGETS,
                        **(environment or {})})
    return notebook


def clean(notebook: NotebookNode) -> None:
    """Takes out what differs from machine to machine: metadata of the kernel and of the run, addresses of objects."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, 1):
        cell.metadata = nbformat.from_dict({})
        cell.id = f"cell-{number}"
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "text/plain" in data:
                data["text/plain"] = _ADDRESS.sub("", data["text/plain"])


def problems(notebook: NotebookNode) -> Iterator[str]:
    """What a committed notebook must not have, in words."""
    cells = notebook.cells
    if cells[0].cell_type != "code" or not cells[0].source.startswith(_INSTALL_LINE):
        yield "the first cell does not install what is missing"
    if notebook.metadata != METADATA:
        yield f"metadata of a certain kernel: {dict(notebook.metadata)}"
    code = [cell for cell in cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        yield "the cells were not run from top to bottom, once, in a fresh kernel"
    for number, cell in enumerate(cells):
        if cell.cell_type == "code":
            try:
                ast.parse(cell.source)
            except SyntaxError as error:
                yield f"cell {number} does not parse: {error}"
        for output in cell.get("outputs", ()):
            yield from (f"cell {number}: {problem}" for problem in _output_problems(output))


def _output_problems(output: NotebookNode) -> Iterator[str]:
    if output.output_type == "error":
        yield f"an error output: {output.ename}"
    data = output.get("data", {})
    if (size := len(json.dumps(output))) > MAX_OUTPUT_BYTES:
        yield f"an output of {size} bytes, at most {MAX_OUTPUT_BYTES}"
    for kind, value in data.items():
        is_picture = kind in PICTURES or (kind == "text/html" and "<svg" in value)
        if is_picture and len(value) > MAX_PICTURE_BYTES:
            yield f"a picture of {len(value)} bytes, at most {MAX_PICTURE_BYTES}"
    for text in (output.get("text", ""), *(value for kind, value in data.items() if kind not in PICTURES)):
        if found := _ABSOLUTE_PATH.search(str(text)):
            yield f"a path of a machine: {found[0]}"


def main(arguments: Sequence[str]) -> int:
    """Executes and saves; a notebook with problems is not saved. Returns the exit code."""
    is_good = True
    for path in [Path(argument) for argument in arguments] or NOTEBOOKS:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        seconds = time.perf_counter() - start
        clean(notebook)
        found = list(problems(notebook))
        if not found:
            nbformat.write(notebook, path)
        is_good = is_good and not found
        print(f"{path.name}: {seconds:.1f} s, {'; '.join(found) or f'{path.stat().st_size:,} bytes'}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
