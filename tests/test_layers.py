"""Who may import whom: read from the source of every module, so that a shortcut between the towers cannot slip in."""
from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import jradix

ROOT = Path(jradix.__file__).parent.parent
GROUND = {"errors", "calls", "config", "sampling_params", "outputs", "batch", "model_files", "gguf_header", "progress",
          "batch_line", "request_file", "result_file", "stats_table", "plots", "tools"}
HOST = {"cache", "sched", "tokenizer", "gguf_tokenizer", "detokenizer", "request_group", "lint", "variable_parts",
        "grammar", "tool_formats", "tool_turn"}
DEVICE = {"ops", "models", "weights", "runner"}
PLANNING = {"cache", "sched"}
TOP = {"jradix", "__main__", "loading", "llm", "llm_cache", "cli", "batch_job",     # "jradix": the package's __init__
       "async_llm", "lm_eval_model", "program", "search"}
BRIDGES = {"engine", "testing"}                              # they run both towers
ASSEMBLERS = {"loading", "llm"}                              # they build the parts and hand them to the engine
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "orbax"}
NOT_IN_THE_PACKAGE = {"torch", "tensorflow"}
LEVELS = [GROUND, HOST | DEVICE, BRIDGES, {"loading"}, {"llm_cache"}, {"llm"},
          {"async_llm", "batch_job", "lm_eval_model", "program"}, {"search"}, {"cli"}, {"jradix", "__main__"}]


def modules() -> dict[str, Path]:
    """Dotted name below the package ("" for the package itself, "ops.attention", ...) to file."""
    found = {}
    for path in sorted((ROOT / "jradix").rglob("*.py")):
        parts = path.relative_to(ROOT / "jradix").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module, does it run when the file is imported) of each import; those for type checkers only are left out."""
    def walk(node: ast.AST, is_top: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, is_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import; this house writes whole names"
            yield node.module, is_top
            yield from ((f"{node.module}.{alias.name}", is_top) for alias in node.names)
        else:
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                children = node.orelse
            else:
                children = ast.iter_child_nodes(node)
            is_lazy = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in children:
                yield from walk(child, is_top and not is_lazy)
    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


def unit(module: str) -> str:
    """The part of the house a module of the package belongs to: its first name below jradix."""
    return module.split(".")[0] or "jradix"


def own_imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Modules of the package that a file imports, by name below jradix."""
    known = modules()
    names = {name.removeprefix("jradix").removeprefix(".") for name, is_top in imports(path)
             if name.split(".")[0] == "jradix" and (is_top or not top_only)}
    return {name for name in names if name in known and (name or path.name != "__init__.py")}


def library_imports(path: Path, *, top_only: bool = False) -> set[str]:
    return {name.split(".")[0] for name, is_top in imports(path) if is_top or not top_only} - {"jradix"}


MODULES = modules()


def each_of(units: set[str]) -> pytest.MarkDecorator:
    chosen = sorted(module for module in MODULES if unit(module) in units)
    return pytest.mark.parametrize("module", chosen, ids=lambda name: name or "__init__")


by_module = each_of(GROUND | HOST | DEVICE | BRIDGES | TOP)


def test_every_module_has_a_place_in_the_house() -> None:
    known = GROUND | HOST | DEVICE | BRIDGES | TOP
    assert {unit(module) for module in MODULES} <= known, "name the new module's layer in this test"
    assert GROUND | HOST | DEVICE <= {unit(module) for module in MODULES}, "a layer names a module that is gone"


@by_module
def test_import_of_the_package_goes_downward(module: str) -> None:
    level = {name: i for i, names in enumerate(LEVELS) for name in names}
    own = unit(module)
    for name in own_imports(MODULES[module]):
        if unit(name) != own and name:
            assert level[unit(name)] <= level[own], f"jradix.{module} imports jradix.{name}, which stands above it"


@each_of(GROUND)
def test_ground_module_imports_only_ground_and_standard_library(module: str) -> None:
    path = MODULES[module]
    assert {unit(name) for name in own_imports(path)} <= GROUND
    assert library_imports(path, top_only=True) <= set(sys.stdlib_module_names) | {"numpy"}
    assert not library_imports(path) & DEVICE_LIBRARIES


@each_of(HOST)
def test_host_module_never_imports_the_device_side(module: str) -> None:
    path = MODULES[module]
    assert {unit(name) for name in own_imports(path)} <= GROUND | HOST
    assert not library_imports(path) & DEVICE_LIBRARIES


@each_of(DEVICE)
def test_device_module_never_imports_the_host_tower(module: str) -> None:
    assert {unit(name) for name in own_imports(MODULES[module])} <= GROUND | DEVICE


@by_module
def test_only_the_engine_sees_both_towers(module: str) -> None:
    """The assembler may load weights and a tokenizer side by side; cache and scheduler are the engine's alone."""
    seen = {unit(name) for name in own_imports(MODULES[module])}
    if unit(module) in BRIDGES:
        return
    assert not (seen & PLANNING and seen & DEVICE), f"jradix.{module} imports {sorted(seen)}"
    if unit(module) not in ASSEMBLERS:
        assert not (seen & HOST and seen & DEVICE), f"jradix.{module} imports {sorted(seen)}"


@by_module
def test_module_imports_no_other_framework(module: str) -> None:
    assert not library_imports(MODULES[module]) & NOT_IN_THE_PACKAGE


def find_cycle(edges: dict[str, set[str]]) -> list[str]:
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name):], name]
        if name not in done:
            done.add(name)
            for other in sorted(edges.get(name, ())):
                if cycle := visit(other, [*path, name]):
                    return cycle
        return []

    return next((cycle for name in sorted(edges) if (cycle := visit(name, []))), [])


def test_imports_of_the_package_form_no_cycle() -> None:
    """Module by module for what runs at import, and part by part with the imports inside functions as well."""
    assert not find_cycle({module: own_imports(path, top_only=True) - {module} for module, path in MODULES.items()})
    parts: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        parts.setdefault(unit(module), set()).update(unit(name) for name in own_imports(path))
    assert not find_cycle({name: others - {name} for name, others in parts.items()})


def test_cycle_finder_finds_a_cycle_and_only_that() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_kernels_import_jax_only() -> None:
    folder = ROOT / "pallas_kernels"
    if not folder.is_dir():
        pytest.skip("no kernels package here")
    allowed = set(sys.stdlib_module_names) | {"jax", "jaxlib", "numpy", "pallas_kernels"}
    for path in sorted(folder.rglob("*.py")):
        names = {name.split(".")[0] for name, _ in imports(path)}
        assert names <= allowed, f"{path.relative_to(ROOT)} imports {sorted(names - allowed)}"


def test_reader_of_imports_sees_each_kind(tmp_path: Path) -> None:
    """The check above is only as good as this reader."""
    path = tmp_path / "sample.py"
    path.write_text("import a.b\nfrom c import d\nif TYPE_CHECKING:\n    import e\nelse:\n    import f\n"
                    "def g():\n    import h\nclass I:\n    import j\n"
                    "try:\n    import k\nexcept ImportError:\n    import l\n")
    assert dict(imports(path)) == {"a.b": True, "c": True, "c.d": True, "f": True, "h": False, "j": True, "k": True,
                                   "l": True}
    path.write_text("from . import x\n")
    with pytest.raises(AssertionError, match="relative import"):
        list(imports(path))


# -- at run time


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT,
                            check=False, env={**os.environ, **environment})
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_of_the_package_loads_neither_jax_nor_transformers() -> None:
    code = "import sys, jradix; print([m for m in ('jax', 'flax', 'transformers', 'torch') if m in sys.modules])"
    assert run_python(code) == "[]"


def test_import_with_an_impossible_platform_succeeds() -> None:
    """B04: importing touches no backend, so a wrong setting is reported where it matters and not here."""
    assert run_python("import jradix; print(jradix.__name__)", JAX_PLATFORMS="nonexistent") == "jradix"


def test_import_of_the_host_tower_loads_no_jax() -> None:
    host = [f"jradix.{module}" for module in MODULES if unit(module) in GROUND | {"cache", "sched", "detokenizer"}]
    code = f"import importlib, sys\nfor m in {host!r}: importlib.import_module(m)\nprint('jax' in sys.modules)"
    assert run_python(code, JAX_PLATFORMS="nonexistent") == "False"


def test_import_of_engine_and_llm_touches_no_backend() -> None:
    """B04: asking for any device would fail under this setting."""
    code = "import jradix.engine, jradix.llm, jradix.cli, sys; print('jax' in sys.modules)"
    assert run_python(code, JAX_PLATFORMS="nonexistent") == "True"
