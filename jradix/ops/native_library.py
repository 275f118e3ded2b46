"""C code of this folder, compiled on first use and registered as targets of XLA's foreign function interface.

A library is one `.c` file with the headers of the folder. It is compiled with the C compiler of this machine ($CC, else
`cc`) for this very processor, into the user's cache directory, where the next process finds it. Nothing is compiled at
installation.
"""
from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import secrets
import shlex
import subprocess
from pathlib import Path

import jax.ffi
import jaxlib

FOLDER = Path(__file__).parent
COMPILE_TIMEOUT_S = 60.0
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=fast", "-w")
_LIBRARIES = ("-lm", "-lpthread")


class NativeLibrary:
    """One C file and what it offers to XLA on CPUs.

    Args:
      name: of the file, without ".c".
      targets: its handlers.
    """

    def __init__(self, name: str, targets: tuple[str, ...]):
        self.name = name
        self.targets = targets

    @functools.cache
    def why_not(self) -> str | None:
        """None where the handlers are registered, which the first call does, or why they cannot be had."""
        if os.name != "posix":
            return f"its C code wants a POSIX system, not {platform.system()}"
        try:
            library = ctypes.CDLL(str(self._compiled(cache_folder())))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:       # RuntimeError: no home directory
            return f"its C code could not be compiled or loaded: {_words(error)}"
        for target in self.targets:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
        return None

    def _compiled(self, folder: Path) -> Path:
        """The shared library for this processor, compiler and jaxlib, compiled unless another process has done it.

        Raises:
          OSError, subprocess.SubprocessError: no compiler, a failed compilation, or a folder that cannot be written.
        """
        source = FOLDER / f"{self.name}.c"
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        version = _run([*compiler, "--version"])
        setup = repr((compiler, _FLAGS, _processor(), jaxlib.__version__)).encode()
        code = (path.read_bytes() for path in (source, *sorted(FOLDER.glob("*.h"))))
        digest = hashlib.blake2b(b"\0".join((version, setup, *code)), digest_size=16).hexdigest()
        path = folder / f"{self.name}-{digest}.so"
        if path.exists():
            return path
        unfinished = folder / f"{path.stem}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        command = [*compiler, *_FLAGS, "-I", jax.ffi.include_dir(), str(source), "-o", str(unfinished), *_LIBRARIES]
        try:
            try:
                _run(command + ["-march=native"])
            except subprocess.CalledProcessError:       # not every compiler knows the processor it runs on
                _run(command)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
        return path


def cache_folder() -> Path:
    """Where compiled code lies, made where it is missing. Code is loaded from it, so it must be this user's alone.

    Raises:
      PermissionError: somebody else could write there.
    """
    folder = Path.home() / ".cache" / "jradix" / "native"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder}: expected a folder that only this user can write; remove it")
    return folder


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_TIMEOUT_S).stdout


def _processor() -> str:
    """What `-march=native` looks at: code for another processor of a shared home directory would crash."""
    lines: set[str] = set()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith(("model name", "flags", "Features", "CPU implementer", "CPU part", "isa")):
                lines.add(line)
    return " ".join([platform.machine(), platform.processor(), *sorted(lines)])


def _words(error: Exception) -> str:
    """The error and the first lines that the compiler said."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else b""
    lines = (said or b"").decode(errors="replace").strip().splitlines()
    return " | ".join([str(error), *lines[:3]])
