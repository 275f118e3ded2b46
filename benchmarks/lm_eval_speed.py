"""Benchmark of lm_eval's model `jradix` against its model `hf`: the same weights, task and requests, in turn.

    python benchmarks/lm_eval_speed.py [--shots 20] [--limit 8] [--sampler first_n]

The task is tests/data/lm_eval/jradix_facts.yaml, four answers of several tokens to each question. With `first_n` all
questions have the same examples in front of them, as in MMLU; with `default` lm_eval draws examples for each question.
Timed is the model's part, tokenising included: its `loglikelihood` on the requests that lm_eval made. hf's best batch
size is found first, which is also its warm-up; jradix warms up on the same requests and starts each turn with an empty
cache. The exit code is 1 when log-likelihoods differ by more than 1e-3, an accuracy differs, or jradix is less than
five times as fast. Needs lm_eval and torch: `pip install "jradix[eval]" torch accelerate`.
"""
from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jradix.model_files import resolve
from llm_runs import add_llm_options, make_llm, use_cache
from report import Watch, print_result, print_table, summarise

ROOT = Path(__file__).resolve().parents[1]
TASKS = ROOT / "tests" / "data" / "lm_eval"
TASK = "jradix_facts"
MAX_DIFFERENCE = 1e-3
MIN_RATIO = 5.0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shots", type=int, default=20)
    parser.add_argument("--limit", type=int, default=8, help="questions (at most 40)")
    parser.add_argument("--sampler", choices=("first_n", "default"), default="first_n")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8], help="of hf; the fastest is used")
    parser.add_argument("--repeats", type=int, default=3)
    add_llm_options(parser)
    options = parser.parse_args(argv)
    try:
        import torch
        from lm_eval.models.huggingface import HFLM

        from jradix.lm_eval_model import JradixLM
        from transformers_baseline import load_torch_model
    except ImportError as error:
        print(f'This benchmark needs lm_eval and torch: pip install "jradix[eval]" torch accelerate ({error})',
              file=sys.stderr)
        return 2
    with make_llm(options) as llm:
        ours = JradixLM(llm)
        theirs = HFLM(pretrained=load_torch_model(resolve(options.model), torch.float32), max_length=ours.max_length,
                      tokenizer=copy.deepcopy(ours.tokenizer), batch_size=options.batch_sizes[0])
        task, requests = make_requests(options)
        ours.loglikelihood(requests, disable_tqdm=True)
        watches = {"jradix": Watch(), "hf": Watch()}
        found: dict[str, list[tuple[float, bool]]] = {}

        def run(name: str) -> float:
            """Wall seconds of one turn."""
            watch = watches[name]
            if name == "jradix":
                use_cache(llm, True)
            watch.start()
            found[name] = (ours if name == "jradix" else theirs).loglikelihood(requests, disable_tqdm=True)
            watch.stop()
            return watch.wall_s[-1]

        def run_batched(batch_size: int) -> float:
            theirs.batch_size_per_gpu = batch_size
            return run("hf")

        best = min(options.batch_sizes, key=run_batched)
        theirs.batch_size_per_gpu = best
        watches["hf"] = Watch()
        computed = llm.stats()["tokens"]["computed_prompt"]
        for repeat in range(options.repeats):
            for name in list(watches)[::1 if repeat % 2 == 0 else -1]:
                run(name)
        computed = (llm.stats()["tokens"]["computed_prompt"] - computed) // options.repeats
        device = llm.stats()["device"]

    difference = float(np.abs(np.subtract([p for p, _ in found["jradix"]], [p for p, _ in found["hf"]])).max())
    num_greedy_differ = sum(a != b for (_, a), (_, b) in zip(found["jradix"], found["hf"]))
    accuracies = {name: accuracy(task, requests, answers) for name, answers in found.items()}
    num_tokens = sum(len(ours.tok_encode("".join(request.args))) for request in requests)
    walls = {name: summarise(watch.wall_s) for name, watch in watches.items()}
    cpus = {name: summarise(watch.cpu_s) for name, watch in watches.items()}
    ratio = walls["hf"].median / walls["jradix"].median
    print_table(f"{TASK}, {options.shots} shots ({options.sampler}), {len(requests)} requests of {num_tokens} tokens", [
        ["model", "dtype", "batch", "wall s", "p90", "CPU s", "requests/s", "accuracy"],
        *([name, options.dtype if name == "jradix" else "float32", None if name == "jradix" else best, *walls[name],
           cpus[name].median, len(requests) / walls[name].median, accuracies[name]] for name in watches)],
        [f"{ratio:.1f} times as fast; jradix computed {computed:,} of {num_tokens:,} tokens",
         f"largest difference of log-likelihoods {difference:.1e}; {num_greedy_differ} of {len(requests)} differ in "
         "is_greedy"])
    holds = {"difference": difference <= MAX_DIFFERENCE, "accuracy": accuracies["jradix"] == accuracies["hf"],
             "ratio": ratio >= MIN_RATIO}
    print_result("lm_eval_speed", dict(
        model=options.model, shots=options.shots, sampler=options.sampler, num_requests=len(requests),
        num_tokens=num_tokens, num_computed_tokens=computed, hf_batch_size=best, wall_s=walls, cpu_s=cpus, ratio=ratio,
        accuracy=accuracies, max_difference=difference, num_greedy_differ=num_greedy_differ, torch=torch.__version__,
        torch_threads=torch.get_num_threads(), repeats=options.repeats, holds=holds), device)
    return 0 if all(holds.values()) else 1


def make_requests(options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The task and its requests, as lm_eval makes them."""
    import yaml
    from lm_eval.tasks import TaskManager
    config = yaml.safe_load((TASKS / f"{TASK}.yaml").read_text(encoding="utf-8"))
    config["dataset_kwargs"]["data_files"] = {
        split: str(ROOT / path) for split, path in config["dataset_kwargs"]["data_files"].items()}
    config["fewshot_config"]["sampler"] = options.sampler
    config["num_fewshot"] = options.shots
    task = TaskManager(include_defaults=False).load([config])["tasks"][TASK]
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=options.limit, rank=0, world_size=1)
    return task, task.instances


def accuracy(task: Any, requests: list[Any], answers: list[tuple[float, bool]]) -> float:
    """Mean of the task's own `acc` over its questions."""
    by_question: dict[int, list[tuple[float, bool]]] = {}
    docs = {}
    for request, answer in zip(requests, answers):
        by_question.setdefault(request.doc_id, []).append(answer)
        docs[request.doc_id] = request.doc
    return float(np.mean([task.process_results(docs[i], found)["acc"] for i, found in by_question.items()]))


if __name__ == "__main__":
    sys.exit(main())
