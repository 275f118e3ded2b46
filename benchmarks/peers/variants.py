"""Ways to run each peer that are compared with one another, how they are written, and how they are started.

    vllm                                    both number types
    vllm/float32                            one of them
    transformers/generate_batch/float32     one of its two methods as well
"""
from __future__ import annotations

import os
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

from peers.environments import Environment
from peers.protocol import Settings

BENCHMARKS = Path(__file__).resolve().parents[1]
DTYPES = ("float32", "bfloat16")
METHODS: dict[str, tuple[str, ...]] = {
    "jradix": ("",), "transformers": ("generate", "generate_batch"), "vllm": ("",), "llama_cpp": ("",)}
# Peers whose ways are alternatives: the fastest in the warm-up of a workload is measured.
TAKE_BEST = ("transformers",)
WITH_SCHEMA = ("jradix", "vllm", "llama_cpp")
WITHOUT_CACHE = ("jradix", "vllm", "llama_cpp")     # where caching is an option, and not one of two methods
ON_TORCH = ("transformers", "vllm")
WAIT_POLICY = "OMP_WAIT_POLICY"


class Variant(NamedTuple):
    """One way to run a peer."""
    peer: str
    dtype: str
    prefix_caching: bool = True
    method: str = ""

    def __str__(self) -> str:
        words = [self.peer, self.method, self.dtype, "" if self.prefix_caching else "nocache"]
        return "/".join(filter(None, words))


REFERENCE = Variant("jradix", "float32")


def parse_variants(texts: Iterable[str], *, prefix_caching: bool = True) -> list[Variant]:
    """Variants as written on the command line, in order, each once; what is not named stands for all there is.

    Raises:
      ValueError: a word that is no peer, number type or method of the peer.
    """
    found: list[Variant] = []
    for text in texts:
        peer, *words = text.split("/")
        if peer not in METHODS:
            raise ValueError(f"peer {peer!r}: expected one of {', '.join(METHODS)}")
        methods = [method for method in METHODS[peer] if method in words] or METHODS[peer]
        dtypes = [dtype for dtype in DTYPES if dtype in words] or DTYPES
        unknown = set(words) - {*methods, *dtypes}
        if unknown:
            raise ValueError(f"{text!r}: {', '.join(sorted(unknown))} is none of "
                             + ", ".join(filter(None, (*DTYPES, *METHODS[peer]))))
        found += [Variant(peer, dtype, prefix_caching, method) for method in methods for dtype in dtypes]
    return list(dict.fromkeys(found))


def why_hopeless(variant: Variant, cpu_flags: Container[str]) -> str | None:
    """Why a variant is not worth its time on this CPU, or None. Those flags are from /proc/cpuinfo."""
    if variant.peer in ON_TORCH and variant.dtype == "bfloat16" and "avx512f" not in cpu_flags:
        return ("oneDNN has no bfloat16 matrix product for a CPU without AVX-512, and the one that torch falls back to "
                "is about nine times slower than float32")
    return None


def cpu_flags() -> frozenset[str]:
    """What the first CPU of this machine can do, in Linux's words; empty where it does not say."""
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        return frozenset(next((line.split(":")[1].split() for line in info if line.startswith("flags")), ()))


def weights_of(variant: Variant, root: Path) -> Path:
    return root / (f"{variant.dtype}.gguf" if variant.peer == "llama_cpp" else variant.dtype)


def command_of(variant: Variant, environment: Environment, settings: Settings) -> list[str]:
    return [str(environment.python), "-m", f"peers.{variant.peer}_peer", settings.as_json()]


def environment_of(variant: Variant, environment: Environment, *, threads: int, is_shared: bool) -> dict[str, str]:
    """Environment variables of a peer's process.

    Args:
      threads: CPU threads to use.
      is_shared: other programs use this machine. OpenMP's threads then sleep while they wait instead of spinning; on a
        quiet machine spinning is their default and faster.
    """
    found = dict(os.environ)
    folders = [BENCHMARKS, *([BENCHMARKS.parent] if variant.peer == "jradix" else [])]
    found["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    found.pop(WAIT_POLICY, None)
    if variant.peer == "jradix":
        return found
    found |= dict(OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1")
    if is_shared:
        found[WAIT_POLICY] = "passive"
    if variant.peer == "vllm":
        # "auto" binds one thread per physical core, which halves a machine whose cores are hyper-threads.
        found |= dict(VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1",
                      VLLM_CACHE_ROOT=str(environment.python.parents[1] / "cache"),
                      LD_PRELOAD=os.pathsep.join(map(str, preloaded(environment))))
    return found


def preloaded(environment: Environment) -> list[Path]:
    """Libraries that vLLM wants before all others, as far as they are here: Intel's OpenMP and tcmalloc."""
    folders = [environment.python.parents[1] / "lib", *Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64")]
    patterns = ("libiomp5.so", "libtcmalloc_minimal.so.4")
    found = [next((file for folder in folders for file in folder.glob(pattern)), None) for pattern in patterns]
    return [file for file in found if file is not None]
