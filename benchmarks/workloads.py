"""The benchmark workloads: request batches from a seed, the same for every engine. It runs nothing itself.

A workload is a generator. Each item is a batch of `Request` to submit at once; the lists of output token ids are sent
back in, because the next batch may continue them. `drive` is that loop:

    done = drive(WORKLOADS["react"]("small"), run=lambda batch: [generate(r.prompt, r.num_output) for r in batch])

Prompts are token ids, so no tokenizer takes part. Engines decode greedily, ignore end tokens and return exactly
`num_output` tokens, so that all do the same work. Standard library only.
"""
from __future__ import annotations

import random
from typing import Any, Callable, Generator, NamedTuple


class Request(NamedTuple):
    """One prompt.

    Attributes:
      prompt: token ids.
      num_output: tokens to generate, neither more nor fewer.
    """
    prompt: list[int]
    num_output: int


Workload = Generator[list[Request], list[list[int]], None]

VOCABULARY = range(100, 49_000)    # plain tokens of SmolLM2; its control tokens lie outside

# Sizes by workload and name; all lengths in tokens. Within "odd" no length is a whole number of pages.
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "react": {
        "tiny": dict(agents=2, turns=3, system=60, observation=20, output=4),
        "small": dict(agents=4, turns=4, system=600, observation=200, output=16),
        "default": dict(agents=8, turns=10, system=600, observation=200, output=24),
        "long": dict(agents=1, turns=10, system=5000, observation=100, output=24),
        "gpu_check": dict(agents=4, turns=4, system=8000, observation=500, output=64),
        "gpu": dict(agents=8, turns=10, system=20_000, observation=500, output=64),
    },
    "mcts": {
        "tiny": dict(parent=128, branches=4, suffix=8, output=4, rounds=2),
        "small": dict(parent=1024, branches=8, suffix=16, output=16, rounds=1),
        "default": dict(parent=2048, branches=16, suffix=16, output=48, rounds=2),
        "odd": dict(parent=2039, branches=16, suffix=13, output=48, rounds=2),
        "gpu_check": dict(parent=8192, branches=16, suffix=16, output=128, rounds=2),
        "gpu": dict(parent=8192, branches=16, suffix=16, output=128, rounds=2),
    },
    "chatbot": {
        "tiny": dict(requests=4, system=64, question=16, output=4),
        "small": dict(requests=8, system=512, question=64, output=16),
        "default": dict(requests=64, system=1024, question=64, output=32),
        "odd": dict(requests=64, system=1019, question=61, output=32),
        "gpu_check": dict(requests=128, system=4096, question=128, output=128),
        "gpu": dict(requests=1024, system=4096, question=128, output=128),
    },
    "noshare": {
        "tiny": dict(requests=4, prompt=32, output=8),
        "small": dict(requests=8, prompt=256, output=16),
        "default": dict(requests=32, prompt=256, output=64),
        "gpu_check": dict(requests=64, prompt=1024, output=256),
        "gpu": dict(requests=256, prompt=1024, output=256),
    },
    "thrash": {
        "tiny": dict(groups=6, requests=3, prefix=64, question=8, output=4),
        "default": dict(groups=24, requests=4, prefix=1024, question=32, output=8),
        "odd": dict(groups=24, requests=4, prefix=1019, question=29, output=8),
    },
}

# A schema with one of each: enum, bounded string, bounded integer, array of bounded length, nested object, number.
PRODUCT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "category": {"type": "string", "enum": ["tool", "toy", "food", "book", "clothing"]},
        "price_cents": {"type": "integer", "minimum": 0, "maximum": 100000},
        "in_stock": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 4},
        "dimensions": {
            "type": "object",
            "properties": {"width": {"type": "integer"}, "height": {"type": "integer"},
                           "unit": {"type": "string", "enum": ["cm", "in"]}},
            "required": ["width", "height", "unit"], "additionalProperties": False},
        "rating": {"type": "number"},
        "summary": {"type": "string", "maxLength": 60},
    },
    "required": ["name", "category", "price_cents", "in_stock", "tags", "dimensions", "rating", "summary"],
    "additionalProperties": False,
}
# Structured output asks JSON_PROMPT as a chat message for each product under PRODUCT_SCHEMA, greedily, with at most
# JSON_MAX_TOKENS tokens. Its baseline is unconstrained and ignores end tokens, with the same number of tokens each.
JSON_PROMPT = "Describe a {product} as a JSON product record."
JSON_MAX_TOKENS = 200
PRODUCTS = ["hammer", "teddy bear", "chocolate cake", "history book", "winter coat", "screwdriver", "board game",
            "olive oil", "atlas", "scarf", "wrench", "kite", "cheese", "novel", "boots", "puzzle"]


def react(size: str, seed: int = 0) -> Workload:
    """Agents in a tool loop: one system prompt for all, and per turn a new observation after all that was said."""
    sizes, rng = _start("react", size, seed)
    system = _draw(rng, sizes["system"])
    contexts = [system] * sizes["agents"]
    for _ in range(sizes["turns"]):
        contexts = [context + _draw(rng, sizes["observation"]) for context in contexts]
        outputs = yield [Request(context, sizes["output"]) for context in contexts]
        contexts = [context + output for context, output in zip(contexts, outputs)]


def mcts(size: str, seed: int = 0) -> Workload:
    """A tree search: many branches from one long parent; the next round branches from the end of one of them."""
    sizes, rng = _start("mcts", size, seed)
    parent = _draw(rng, sizes["parent"])
    for _ in range(sizes["rounds"]):
        branches = [parent + _draw(rng, sizes["suffix"]) for _ in range(sizes["branches"])]
        chosen = rng.randrange(sizes["branches"])
        outputs = yield [Request(branch, sizes["output"]) for branch in branches]
        parent = branches[chosen] + outputs[chosen]


def chatbot(size: str, seed: int = 0) -> Workload:
    """Short questions after one long system prompt, all at once: the prefix can only be shared inside the batch."""
    sizes, rng = _start("chatbot", size, seed)
    system = _draw(rng, sizes["system"])
    yield [Request(system + _draw(rng, sizes["question"]), sizes["output"]) for _ in range(sizes["requests"])]


def noshare(size: str, seed: int = 0) -> Workload:
    """Prompts without a common prefix: the cache has to be free where it is of no use."""
    sizes, rng = _start("noshare", size, seed)
    yield [Request(_draw(rng, sizes["prompt"]), sizes["output"]) for _ in range(sizes["requests"])]


def thrash(size: str, seed: int = 0) -> Workload:
    """More prefixes than a small pool holds, in turn: served in order of arrival, each is evicted before it returns."""
    sizes, rng = _start("thrash", size, seed)
    prefixes = [_draw(rng, sizes["prefix"]) for _ in range(sizes["groups"])]
    rounds = range(sizes["requests"])
    yield [Request(prefix + _draw(rng, sizes["question"]), sizes["output"]) for _ in rounds for prefix in prefixes]


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "react": react, "mcts": mcts, "chatbot": chatbot, "noshare": noshare, "thrash": thrash}


def drive(workload: Workload, run: Callable[[list[Request]], list[list[int]]]) -> list[tuple[Request, list[int]]]:
    """Runs a workload to its end.

    Args:
      workload: one that was not started.
      run: takes a batch and returns the output token ids of each request, in order.

    Returns:
      Every request with its output, in order of submission.

    Raises:
      ValueError: `run` returned another number of outputs, or of tokens in one of them, than it was asked for.
    """
    done: list[tuple[Request, list[int]]] = []
    outputs: list[list[int]] | None = None
    while True:
        try:
            batch = next(workload) if outputs is None else workload.send(outputs)
        except StopIteration:
            return done
        outputs = run(batch)
        if len(outputs) != len(batch):
            raise ValueError(f"a batch of {len(batch)} requests came back with {len(outputs)} outputs")
        for request, output in zip(batch, outputs):
            if len(output) != request.num_output:
                raise ValueError(f"an output of {len(output)} tokens, but the request asks for exactly "
                                 f"{request.num_output}: greedy decoding has to ignore end tokens")
            done.append((request, output))


def minimum_computed_tokens(done: list[tuple[Request, list[int]]]) -> int:
    """Prompt tokens that even an unlimited cache without page boundaries has to compute.

    A prompt position is computed once, unless a decode step before it left the same position behind; the last output
    token of a request is sampled but never run. A prompt that is known from end to end still costs its last token,
    whose logits are needed.

    Args:
      done: requests and outputs in the order of submission, as `drive` returns them.
    """
    edges: dict[tuple[int, int], int] = {}     # (node, token) -> node; node 0 is the empty prefix

    def walk(node: int, tokens: list[int]) -> int:
        for token in tokens:
            node = edges.setdefault((node, token), len(edges) + 1)
        return node

    num_computed = 0
    for request, output in done:
        num_before = len(edges)
        end = walk(0, request.prompt)
        num_computed += max(len(edges) - num_before, 1)
        walk(end, output[:-1])
    return num_computed


def _start(workload: str, size: str, seed: int) -> tuple[dict[str, int], random.Random]:
    """The sizes of a run and its random numbers, which depend on all three arguments."""
    if size not in SIZES[workload]:
        raise ValueError(f"workload {workload!r} has no size {size!r}; it has {', '.join(SIZES[workload])}")
    return SIZES[workload][size], random.Random(f"{workload}-{size}-{seed}")


def _draw(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.choice(VOCABULARY) for _ in range(num_tokens)]
