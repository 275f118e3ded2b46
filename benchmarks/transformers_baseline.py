"""Benchmark against transformers: the same weights, requests and machine, in turn with jradix.

    python benchmarks/transformers_baseline.py --size default --workloads noshare chatbot

transformers' `generate` runs static batches with left padding, greedily and to exactly the asked number of tokens. Its
best batch size per number type is found first, on the same workload with another seed, which is also its warm-up;
jradix warms up on that seed too. Both get the tensors that jradix's own reader takes from the checkpoint. jradix itself
never needs torch; this script does: `pip install torch`.
"""
from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from jradix.model_files import ModelFiles, resolve
from jradix.weights.gguf import GGUFSource
from jradix.weights.hf import SafetensorsSource
from jradix.weights.loader import EMBEDDING, HEAD, TensorSource, load_hf_config
from llm_runs import add_llm_options, make_llm, run_workload, use_cache
from report import Summary, Watch, print_result, print_table, summarise
from workloads import SIZES, WORKLOADS, Request, drive

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

PAD = 0     # masked; which id it is does not matter


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small")
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["noshare", "chatbot"])
    parser.add_argument("--torch-dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    add_llm_options(parser)
    options = parser.parse_args(argv)
    for name in options.workloads:
        if options.size not in SIZES[name]:
            parser.error(f"--size {options.size}: {name} has {', '.join(SIZES[name])}")
    try:
        import torch
    except ImportError:
        print("This benchmark runs transformers beside jradix and needs torch, which is not installed here: "
              "pip install torch", file=sys.stderr)
        return 2
    files = resolve(options.model)
    models = {name: load_torch_model(files, getattr(torch, name)) for name in options.torch_dtypes}
    result: dict[str, Any] = dict(size=options.size, model=options.model, jradix_dtype=options.dtype,
                                  repeats=options.repeats, torch=torch.__version__,
                                  torch_threads=torch.get_num_threads(), workloads={})
    with make_llm(options) as llm:
        device = llm.stats()["device"]
        for name in options.workloads:
            rows, result["workloads"][name] = compare(llm, models, name, options)
            print_table(f"{name}, {options.size}", rows, [
                f"medians of {options.repeats} runs in turn, after one warm-up run each with another seed; ratio: "
                "jradix's requests/s over theirs"])
    print_result("transformers_baseline", result, device)
    return 0


def compare(llm: Any, models: dict[str, PreTrainedModel], workload: str, options: argparse.Namespace
            ) -> tuple[list[list[Any]], dict[str, Any]]:
    """Runs one workload through every engine in turn."""
    make = WORKLOADS[workload]

    def run_jradix(seed: int) -> tuple[float, list[list[int]]]:
        use_cache(llm, True)
        run = run_workload(llm, make(options.size, seed))
        return run.wall_s, [output for _, output in run.done]

    def run_torch(model: PreTrainedModel, batch_size: int, seed: int) -> tuple[float, list[list[int]]]:
        watch = Watch()

        def run_batch(batch: list[Request]) -> list[list[int]]:
            watch.start()
            found = generate(model, batch, batch_size)
            watch.stop()
            return found

        done = drive(make(options.size, seed), run_batch)
        return sum(watch.wall_s), [output for _, output in done]

    run_jradix(options.seed + 1)
    first_batch = next(make(options.size, options.seed))
    sizes = sorted({min(size, len(first_batch)) for size in options.batch_sizes})
    for model in models.values():
        generate(model, [Request(first_batch[0].prompt, 2)], 1)     # so that no batch size pays for the first call
    best = {dtype: min(sizes, key=lambda size: run_torch(model, size, options.seed + 1)[0])
            for dtype, model in models.items()}
    engines = {"jradix": lambda: run_jradix(options.seed)}
    for dtype, model in models.items():
        engines[f"transformers {dtype}"] = (
            lambda model=model, size=best[dtype]: run_torch(model, size, options.seed))
    times: dict[str, list[float]] = {name: [] for name in engines}
    outputs: dict[str, list[list[int]]] = {}
    for repeat in range(options.repeats):
        for name in list(engines)[::1 if repeat % 2 == 0 else -1]:
            wall, outputs[name] = engines[name]()
            times[name].append(wall)

    done = outputs["jradix"]
    num_tokens = sum(map(len, done))
    fastest = summarise(times["jradix"]).median
    rows: list[list[Any]] = [["", "dtype", "batch", "wall s", "p90", "requests/s", "output tokens/s", "ratio",
                              "same outputs as jradix"]]
    lines = []
    for name, taken in times.items():
        wall: Summary = summarise(taken)
        dtype = options.dtype if name == "jradix" else name.split()[1]
        batch = None if name == "jradix" else best[dtype]
        same = f"{sum(a == b for a, b in zip(outputs[name], done))} of {len(done)}"
        rows.append([name.split()[0], dtype, batch, *wall, len(done) / wall.median, num_tokens / wall.median,
                     wall.median / fastest, same])
        lines.append(dict(engine=name.split()[0], dtype=dtype, batch_size=batch, wall_s=wall,
                          requests_per_s=len(done) / wall.median, output_tokens_per_s=num_tokens / wall.median,
                          ratio=wall.median / fastest, same_outputs=same))
    return rows, dict(num_requests=len(done), num_output_tokens=num_tokens, engines=lines)


def generate(model: PreTrainedModel, requests: list[Request], batch_size: int) -> list[list[int]]:
    """Greedy outputs of exactly the asked length, in batches of requests that are as long and generate as much."""
    import torch
    outputs: list[list[int]] = [[] for _ in requests]
    order = sorted(range(len(requests)), key=lambda i: (requests[i].num_output, len(requests[i].prompt)))
    start = 0
    while start < len(order):
        num_output = requests[order[start]].num_output
        chosen = [i for i in order[start:start + batch_size] if requests[i].num_output == num_output]
        start += len(chosen)
        width = max(len(requests[i].prompt) for i in chosen)
        ids = torch.full((len(chosen), width), PAD, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(chosen):
            prompt = requests[i].prompt
            ids[row, width - len(prompt):] = torch.tensor(prompt)
            mask[row, width - len(prompt):] = 1
        with torch.inference_mode():
            found = model.generate(ids, attention_mask=mask, max_new_tokens=num_output, min_new_tokens=num_output,
                                   do_sample=False)
        for row, i in enumerate(chosen):
            outputs[i] = found[row, width:].tolist()
    return outputs


def load_torch_model(files: ModelFiles, dtype: torch.dtype) -> PreTrainedModel:
    """The checkpoint as a transformers model, with the tensors that jradix reads from it and no end tokens.

    Raises:
      ValueError: the checkpoint is an Orbax folder, or its tensors are not those of the model.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    if files.kind == "orbax":
        raise ValueError(f"{files.name}: transformers cannot read Orbax; name the checkpoint it was converted from")
    source: TensorSource = GGUFSource(files.path) if files.kind == "gguf" else SafetensorsSource(files.path)
    model = AutoModelForCausalLM.from_config(load_hf_config(files), dtype=dtype)
    tensors = {name: torch.from_numpy(np.array(source.read(name), np.float32)).to(dtype) for name in source.shapes}
    if model.config.tie_word_embeddings:
        tensors[HEAD] = tensors[EMBEDDING]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if missing or unexpected:
        raise ValueError(f"{files.name}: tensors missing {missing}, unexpected {unexpected}")
    model.generation_config = GenerationConfig(eos_token_id=None, bos_token_id=None, pad_token_id=PAD)
    return model.eval()


if __name__ == "__main__":
    sys.exit(main())
