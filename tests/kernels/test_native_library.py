"""C code that is compiled on first use: where it lies, and what is said where it cannot be had."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jradix.ops.native_library import cache_folder
from matrix_unit import HAS_MATRIX_UNIT, WITHOUT_TILES

REPOSITORY = Path(__file__).parents[2]
NO_COMPILER = """
from jradix.ops import attention_native, matmul_native
print(attention_native.why_not())
print(matmul_native.why_not())
"""


@pytest.mark.parametrize("compiler, said", [("/nonexistent/cc", "No such file"), ("false", "returned non-zero")])
def test_without_a_compiler_the_reason_is_given(tmp_path: Path, compiler: str, said: str) -> None:
    environment = os.environ | dict(CC=compiler, HOME=str(tmp_path), JAX_PLATFORMS="cpu", PYTHONPATH=str(REPOSITORY))
    done = subprocess.run([sys.executable, "-c", NO_COMPILER], env=environment, capture_output=True, text=True,
                          check=True)
    reasons = done.stdout.splitlines()
    assert len(reasons) == 2 and all("could not be compiled or loaded" in reason for reason in reasons)
    assert all(said in reason for reason in reasons)
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_folder_of_compiled_code_that_others_can_write_is_refused(tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = cache_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="only this user can write"):
        cache_folder()


@pytest.mark.skipif(not HAS_MATRIX_UNIT, reason="a processor with a matrix unit: elsewhere vectors are tested anyway")
def test_vectors_pass_the_same_tests_where_there_is_a_matrix_unit() -> None:
    files = [str(Path(__file__).with_name(name)) for name in ("test_matmul_native.py", "test_native.py")]
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files], check=True,
                   env=os.environ | dict(CC=f"{os.environ.get('CC', 'cc')} {WITHOUT_TILES}"))
