"""Compares jradix with what users would pick instead: the same weights, requests and machine, in turn.

    make bench-env PEER=vllm                                        # once per peer: transformers, vllm, llama_cpp
    python benchmarks/compare.py --size default --reps 5
    python benchmarks/compare.py --workloads react mcts --peers jradix/float32 vllm/float32 --size small --reps 1

Every peer runs in a process of its own, loads its weights once, and is stopped while others have their turn. A round is
one run of each peer, one after the other, on a workload that begins with an empty cache; before it the machine has to
be quiet, as far as `--quiet-s` allows. Ratios are taken within a round: a peer's wall time over that of jradix in
float32, so that above 1 jradix is faster. Before its rounds each peer runs the workload once with another seed. A
second pass compares the same peers with their caches off. benchmarks/README.md says what each figure means.
"""
from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peers.comparison import JSON, Comparison, JsonTask, common_settings, say
from peers.comparison_plots import write_plots
from peers.environments import DEFAULT_ROOT, Environment, NotInstalled, find
from peers.figures import Row, json_cells, markdown, workload_cells, workload_rows
from peers.peer_process import PeerFailed
from peers.roofline import Model, Rates, least_s, measure
from peers.runs import Run, num_json
from peers.variants import DTYPES, REFERENCE, WITHOUT_CACHE, Variant, cpu_flags, parse_variants, why_hopeless
from report import machine, print_result, print_table
from workloads import JSON_MAX_TOKENS, JSON_PROMPT, PRODUCTS, SIZES, WORKLOADS

JSON_SIZES = {"tiny": (2, 24), "small": (8, 100)}       # documents and tokens; all of them at any other size
HERE = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> int:
    options = read_options(argv)
    environments, left_out = find_all([variant.peer for variant in options.variants + options.uncached], options.root)
    left_out |= hopeless(options.variants, options.peers)
    for reason in left_out.values():
        say(reason)
    cached, uncached = ([variant for variant in each if variant.peer in environments
                         and str(variant._replace(prefix_caching=True)) not in left_out]
                        for each in (options.variants, options.uncached))
    weights = write_weights(options.model, options.root / "weights")
    num_documents, max_tokens = JSON_SIZES.get(options.size, (len(PRODUCTS), JSON_MAX_TOKENS))
    json_task = JsonTask(json_prompts(weights / REFERENCE.dtype, num_documents)
                         if JSON in options.workloads else [], max_tokens)
    logs = options.root / "logs"
    for folder in (logs, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(
        environments, common_settings(options.workloads, options.size, json_task, threads=options.threads,
                                      kv_bytes=options.kv_bytes),
        weights=weights, logs=logs, size=options.size, seed=options.seed, json_task=json_task, quiet_s=options.quiet_s)
    rates = measure()
    try:
        comparison.run_pass(cached, options.workloads, options.reps)
        without_json = [name for name in options.workloads if name != JSON]
        if options.uncached_reps and uncached and without_json:
            comparison.run_pass([REFERENCE, *uncached], without_json, options.uncached_reps)
    except PeerFailed:
        say(f"{REFERENCE} failed, and nothing can be compared without it")
    finally:        # also after an interrupt: what was measured by then
        result = report(comparison, left_out, options, rates)
    print_result("compare", result)
    return int(bool(comparison.failed))


def read_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", default=["react", "mcts", "chatbot", "noshare", JSON])
    parser.add_argument("--size", default="small")
    parser.add_argument("--peers", nargs="+", default=["jradix", "transformers", "vllm", "llama_cpp"],
                        help="peer, or peer/method/dtype with any of the parts after the first left out")
    parser.add_argument("--uncached", nargs="*", help="peers to run with their caches off as well; default: of --peers "
                        f"those that can: {', '.join(WITHOUT_CACHE)}")
    parser.add_argument("--reps", type=int, default=5, help="rounds of each workload")
    parser.add_argument("--uncached-reps", type=int, default=2, help="rounds with caches off; 0: none")
    parser.add_argument("--model", default="demo", help="as for LLM; its vocabulary must hold ids up to 48,999")
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="folder of the peers' environments and weights")
    parser.add_argument("--out", type=Path, help="folder for JSON, Markdown and plots; default: one under results/")
    parser.add_argument("--kv-bytes", type=int, default=2 * 2**30, help="memory for KV of each peer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quiet-s", type=float, default=600, help="most seconds to wait for a quiet machine, in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-plots", action="store_true")
    options = parser.parse_args(argv)
    options.root = options.root.resolve()
    options.out = options.out or HERE / "results" / f"{time.strftime('%Y-%m-%d')}-compare-{options.size}"
    options.workloads = split(options.workloads)
    options.peers = split(options.peers)
    for name in options.workloads:
        if name not in (*WORKLOADS, JSON):
            parser.error(f"--workloads {name}: expected {', '.join([*WORKLOADS, JSON])}")
        if name != JSON and options.size not in SIZES[name]:
            parser.error(f"--size {options.size}: {name} has {', '.join(SIZES[name])}")
    try:
        options.variants = parse_variants([str(REFERENCE), *options.peers])
        options.uncached = parse_variants(
            [name for name in options.peers if name.split("/")[0] in WITHOUT_CACHE] if options.uncached is None
            else split(options.uncached), prefix_caching=False)
    except ValueError as error:
        parser.error(f"--peers, --uncached: {error}")
    cannot = {variant.peer for variant in options.uncached} - set(WITHOUT_CACHE)
    if cannot:
        parser.error(f"--uncached {', '.join(cannot)}: expected some of {', '.join(WITHOUT_CACHE)}")
    if not options.no_plots and importlib.util.find_spec("matplotlib") is None:
        parser.error('the plots need matplotlib: pip install "jradix[plots]", or give --no-plots')
    return options


def split(texts: Iterable[str]) -> list[str]:
    return [name for text in texts for name in text.split(",")]


def find_all(peers: list[str], root: Path) -> tuple[dict[str, Environment], dict[str, str]]:
    """Environments of the peers that are installed, and why the others are not."""
    environments: dict[str, Environment] = {}
    missing: dict[str, str] = {}
    for peer in dict.fromkeys(peers):
        try:
            environments[peer] = find(peer, root)
        except NotInstalled as error:
            missing[peer] = str(error)
    return environments, missing


def hopeless(variants: list[Variant], peers: list[str]) -> dict[str, str]:
    """Why some variants are not run: they are not worth their time on this CPU, and nobody named their number type."""
    named = parse_variants(text for text in peers if set(text.split("/")) & set(DTYPES))
    flags = cpu_flags()
    found = {variant: why_hopeless(variant, flags) for variant in variants if variant not in named}
    return {str(variant): f"{variant} is left out: {reason}; name it to run it all the same"
            for variant, reason in found.items() if reason}


def json_prompts(folder: Path, num_documents: int) -> list[list[int]]:
    """Chat prompts for the documents, as ids, so that no engine's tokenizer or template takes part."""
    from jradix.tokenizer import Tokenizer
    tokenizer = Tokenizer.from_folder(folder)
    return [tokenizer.apply_chat_template([{"role": "user", "content": JSON_PROMPT.format(product=product)}])
            for product in PRODUCTS[:num_documents]]


def write_weights(model: str, folder: Path) -> Path:
    """Writes the weights in all formats, unless they are there. Raises CalledProcessError when they cannot be."""
    ready = folder / "ready"
    if not ready.is_file() or ready.read_text(encoding="utf-8") != model:
        say(f"writing the weights of {model} to {folder}")
        subprocess.run([sys.executable, "-m", "peers.weights", "--model", model, "--root", str(folder)], check=True,
                       env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])})
    return folder


def report(comparison: Comparison, left_out: dict[str, str], options: argparse.Namespace, rates: Rates
           ) -> dict[str, Any]:
    """Prints the tables, writes JSON, Markdown and plots, and returns what the JSON holds."""
    sizes = Model.of(options.root / "weights" / REFERENCE.dtype)

    def least(name: str, run: Run) -> float:
        dtype, = set(name.split("/")) & set(DTYPES)
        return least_s(run.batches, sizes, dtype, rates)

    rows: dict[str, list[Row]] = {workload: workload_rows(runs, str(REFERENCE), least)
                                  for workload, runs in comparison.runs.items()}
    tables = {workload: workload_cells(each) for workload, each in rows.items()}
    if comparison.json_runs:
        from jradix.tokenizer import Tokenizer
        decode = Tokenizer.from_folder(options.root / "weights" / REFERENCE.dtype).decode
        num_whole = {name: num_json(runs[0].outputs, decode) for name, runs in comparison.json_runs.items()}
        tables[JSON] = json_cells(comparison.json_runs, num_whole, str(REFERENCE))
    notes = list(left_out.values())
    notes += [f"{name} failed: {reason.splitlines()[0]}" for name, reason in comparison.failed.items()]
    notes += [f"{workload}: {name} took {wall_s:.3f} s in the warm-up, slower than another way of the same peer"
              for workload, each in comparison.dropped.items() for name, wall_s in each.items()]
    notes += [f"{name}: ready after {peer['startup_s']:.1f} s; "
              + "; ".join([*(f"{package} {version}" for package, version in peer["versions"].items()), *peer["notes"]])
              for name, peer in comparison.peers.items()]
    notes.append(f"roofline: {rates.gflop_per_s:.0f} GFLOP/s of float32 products and {rates.gb_per_s:.1f} GB/s from "
                 "memory, the best of a few tries before the first round")
    if comparison.noise:
        notes.append(f"the machine was not quiet at {len(comparison.noise)} starts of rounds: "
                     f"{min(comparison.noise):.2f} to {max(comparison.noise):.2f} cores busy elsewhere")
    for workload, cells in tables.items():
        print_table(f"{workload}, {options.size}", cells)
    for note in notes:
        print(note)
    result = dict(
        date=time.strftime("%Y-%m-%d"), size=options.size, reps=options.reps, uncached_reps=options.uncached_reps,
        model=options.model, reference=str(REFERENCE), kv_bytes=options.kv_bytes, threads=options.threads,
        peers=comparison.peers, left_out=left_out, failed=comparison.failed, dropped=comparison.dropped,
        noise=comparison.noise, rates=rates._asdict(),
        workloads={workload: [dict(dataclasses.asdict(row), ratio=row.ratio, same_type_ratio=row.same_type_ratio,
                                   roofline_share=row.roofline_share)
                              for row in each] for workload, each in rows.items()},
        json={name: [dict(constrained_s=run.constrained_s, free_s=run.free_s, ratio=run.ratio) for run in runs]
              for name, runs in comparison.json_runs.items()})
    where = machine()
    title = f"{options.size} sizes, {where['cpu']}, {where['cores']} cores, {result['date']}"
    (options.out / "comparison.json").write_text(json.dumps(dict(result, machine=where), indent=1), encoding="utf-8")
    sections = [f"## {workload}\n\n{markdown(cells)}\n" for workload, cells in tables.items()]
    (options.out / "comparison.md").write_text(
        "".join([f"# Comparison: {title}\n\n", *sections, *(f"- {note}\n" for note in notes)]), encoding="utf-8")
    if rows and not options.no_plots:
        write_plots(rows, options.out, title)
    say(f"written to {options.out}")
    return result


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # ends the peers too
    sys.exit(main())
