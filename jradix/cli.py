"""The command line: `jradix run` answers a file of requests, `jradix lint` looks at one before it is run, `jradix
convert` rewrites a checkpoint.

Exit codes: 0 all good; 1 finished, and some lines are error records, or lint: the reuse is below --fail-under;
2 could not run; 130 interrupted;
141 the reader of the printed answers has gone.
Nothing heavy is imported before a command needs it.
"""
from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jradix.config import EVICTION_POLICIES
from jradix.errors import BatchFileError, JradixError
from jradix.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jradix.llm import LLM

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", re.IGNORECASE | re.ASCII)

# options handed to LLM under their own names; one that is not given leaves the LLM its default
_LLM_OPTIONS = ("dtype", "page_size", "kv_cache_bytes", "max_model_len", "max_num_seqs", "prefill_chunk_tokens", "seed",
                "device", "tokenizer", "revision", "memory_fraction", "decode_steps", "batch_order", "eviction_policy",
                "min_ttl_s", "host_cache_bytes", "deterministic")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        return args.command(args)
    except JradixError as error:
        print(f"jradix: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"jradix: interrupted. {args.when_interrupted}", file=sys.stderr)
        return 130
    except BrokenPipeError:        # who read the answers, `head` for one, has gone: nothing more can be said there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parse_size(text: str) -> int:
    """Bytes from `2GiB`, `512MiB`, `1.5G` or `1000000`; KiB is 1024 bytes, KB (or K) 1000.

    Raises:
      argparse.ArgumentTypeError: the text is no size, or less than one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[(match[2] or "").upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: expected bytes, or a number with a unit as in 2GiB or "
                                         "512MiB")
    return size


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a positive integer")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, zero or more")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0 and at most 1")
    return value


def _sampling(name: str, number: type) -> Any:
    """An argparse type: a number that `SamplingParams` accepts under this name."""
    def parse(text: str) -> float:
        try:
            value = number(text)
            SamplingParams(**{name: value})
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return parse


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jradix", description="Batch inference that computes a shared prefix once.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="answer a file of requests",
        description="Answers a JSONL file of requests (OpenAI's batch form, or {\"prompt\": ...} or {\"messages\": "
                    "...} on each line). Results are written as they finish; the same command run again resumes. "
                    "Lines that cannot be answered become error records, and exit code 1 says so.")
    run.set_defaults(command=_run)
    run.add_argument("input", metavar="requests.jsonl", help="request lines")
    run.add_argument("-o", "--output", required=True, metavar="FILE", help="result lines; existing ones are kept")
    run.add_argument("--model", required=True, help="model folder, GGUF file, converted folder, hub id or demo")
    model = run.add_argument_group("model and memory")
    model.add_argument("--dtype", help="auto, float32, bfloat16 or float16")
    model.add_argument("--device", help="cpu, gpu or tpu; by default the best there is")
    model.add_argument("--tokenizer", help="where the tokenizer is, if not with the model")
    model.add_argument("--revision", help="revision of the model")
    model.add_argument("--kv-cache-bytes", type=parse_size, metavar="SIZE", help="memory of the KV cache, as in 2GiB")
    model.add_argument("--memory-fraction", type=_fraction, metavar="F", help="share of the free memory to use")
    model.add_argument("--page-size", type=_positive, metavar="N", help="tokens per KV page")
    model.add_argument("--max-model-len", type=_positive, metavar="N", help="longest prompt plus output, in tokens")
    model.add_argument("--max-num-seqs", type=_positive, metavar="N", help="requests that run at the same time")
    model.add_argument("--prefill-chunk-tokens", type=_positive, metavar="N", help="prompt tokens computed in one step")
    model.add_argument("--deterministic", action="store_true", default=None,
                       help="the same log-probabilities to the last bit, whatever is cached and whatever runs beside")
    model.add_argument("--decode-steps", type=_positive, metavar="N", help="decode steps in one device call")
    cache = run.add_argument_group("prefix cache")
    cache.add_argument("--cache-dir", metavar="DIR",
                       help="start from the cache saved there, and save it there at the end")
    cache.add_argument("--host-cache-bytes", type=parse_size, metavar="SIZE",
                       help="memory of the machine for what the KV cache has no room for")
    cache.add_argument("--eviction-policy", choices=EVICTION_POLICIES,
                       help="what leaves the cache first (default: lru)")
    cache.add_argument("--min-ttl-s", type=_seconds, metavar="S",
                       help="do not evict what was used in the last S seconds while anything older is there")
    cache.add_argument("--batch-order", choices=("depth_first", "arrival"),
                       help="run the lines in the order in which they share most (default), or as they come")
    cache.add_argument("--no-prefix-caching", action="store_true", help="compute every prompt from its first token")
    sampling = run.add_argument_group("for lines that do not say")
    sampling.add_argument("--max-tokens", type=_sampling("max_tokens", int), metavar="N", help="output tokens at most")
    sampling.add_argument("--temperature", type=_sampling("temperature", float), metavar="T", help="0 is greedy")
    sampling.add_argument("--seed", type=int, default=0, help="of the engine (default: 0)")
    job = run.add_argument_group("the job")
    job.add_argument("--max-inflight", type=_positive, metavar="N",
                     help="requests open at a time (default: four times --max-num-seqs, or 256)")
    job.add_argument("--overwrite", action="store_true", help="throw away the results that are there")
    job.add_argument("--strict", action="store_true", help="refuse the job when a line is malformed")
    job.add_argument("--report", metavar="FILE", help="write the summary as JSON")
    job.add_argument("--print-answers", action="store_true", help="print all answers at the end, in input order")
    job.add_argument("--no-progress", action="store_true", help="no progress bar (there is none without a terminal)")

    lint = commands.add_parser(
        "lint", help="say what a file of requests will share, before it is run",
        description="Looks at a JSONL file of requests without running it: how much of the prompts will be reused, "
                    "which prefixes are shared, and which variable parts (dates, ids) in front of shared text keep it "
                    "from being reused. Malformed lines are listed.")
    lint.set_defaults(command=_lint, when_interrupted="Nothing was written.")
    lint.add_argument("input", metavar="requests.jsonl", help="request lines")
    lint.add_argument("--model", help="count the tokens of this model; its weights are not read (default: approximate)")
    lint.add_argument("--page-size", type=_positive, metavar="N", default=16, help="tokens per KV page (default: 16)")
    lint.add_argument("--fail-under", type=_fraction, metavar="F",
                      help="exit with 1 when the reuse is below this fraction, as in 0.6")
    lint.add_argument("--json", action="store_true", help="print one JSON object")

    convert = commands.add_parser("convert", help="rewrite a checkpoint for fast loading",
                                  description="Rewrites a checkpoint in a form that loads faster.")
    convert.set_defaults(command=_convert, when_interrupted="The output may be incomplete: run the command again.")
    convert.add_argument("model", metavar="MODEL", help="model folder, GGUF file, hub id or demo")
    convert.add_argument("out", metavar="OUT", help="folder to write")
    convert.add_argument("--dtype", help="dtype of the written weights")
    return parser


def _run(args: argparse.Namespace) -> int:
    again = "the same command without --overwrite" if args.overwrite else "the same command"
    args.when_interrupted = f"Finished results are kept in {args.output}; {again} resumes."
    from jradix.batch_job import DEFAULT_MAX_INFLIGHT, run_batch
    from jradix.cache.snapshot import has_snapshot, saved_weight_dtype

    options = {name: getattr(args, name) for name in _LLM_OPTIONS if getattr(args, name) is not None}
    if args.no_prefix_caching:
        options["enable_prefix_caching"] = False
    if args.no_progress:
        options["progress"] = False
    if has_snapshot(args.cache_dir):
        options["load_cache"] = args.cache_dir
        options.setdefault("dtype", saved_weight_dtype(args.cache_dir))     # "auto" may measure another one today
    if args.cache_dir and args.no_prefix_caching:
        raise BatchFileError("--cache-dir and --no-prefix-caching: leave one of them out")

    def open_llm() -> LLM:
        from jradix.llm import LLM

        return LLM(args.model, **options)

    defaults = {name: getattr(args, name) for name in ("max_tokens", "temperature") if getattr(args, name) is not None}
    max_inflight = args.max_inflight or (4 * args.max_num_seqs if args.max_num_seqs else DEFAULT_MAX_INFLIGHT)
    summary = run_batch(args.input, args.output, open_llm, defaults=defaults,
                        settings={"seed": args.seed, "max_model_len": args.max_model_len}, max_inflight=max_inflight,
                        overwrite=args.overwrite, strict=args.strict, report_path=args.report, cache_dir=args.cache_dir,
                        show_progress=not args.no_progress, answers_to=sys.stdout if args.print_answers else None)
    sys.stdout.flush()
    print(summary, file=sys.stderr)
    return 1 if summary.errors else 0


def _lint(args: argparse.Namespace) -> int:
    from jradix.lint import lint_file

    report = lint_file(args.input, model=args.model, page_size=args.page_size)
    print(report.to_json() if args.json else report)
    sys.stdout.flush()
    if args.fail_under is not None and report.reuse < args.fail_under:
        print(f"jradix: the reuse of {report.reuse:.1%} is below --fail-under {args.fail_under:.1%}", file=sys.stderr)
        return 1
    return 0


def _convert(args: argparse.Namespace) -> int:
    from jradix.loading import convert

    convert(args.model, args.out, **({} if args.dtype is None else {"dtype": args.dtype}))
    return 0
