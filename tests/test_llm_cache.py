"""`llm.cache` and batch order, on a tiny checkpoint: pins, eviction by hand, snapshots, explanations, pictures."""
from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import pytest

from jradix import LLM, SamplingParams
from jradix.errors import DeviceError, EngineError, PinError, RequestError, SnapshotError
from test_llm import SIZES, compiled, folder, save_model  # noqa: F401  (fixtures)

SYSTEM = "you are a helpful and very brief assistant. "


def greedy(max_tokens: int = 4, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **fields)


@pytest.fixture(scope="module")
def shared(folder: Path, compiled: Path) -> Iterator[LLM]:  # noqa: F811
    with LLM(folder, compile_cache_dir=compiled, **SIZES) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> LLM:
    shared.cache.clear(unpin=True)
    return shared


def open_llm(folder: Path, compiled: Path, **options: object) -> LLM:  # noqa: F811
    return LLM(folder, compile_cache_dir=compiled, **{**SIZES, **options})


def flood(llm: LLM) -> None:
    """Requests enough to push everything unprotected out of the pool."""
    llm.generate([chr(97 + i % 26) * 100 + str(i) for i in range(40)], greedy(2))


def test_pin_computes_and_survives_a_flood(llm: LLM) -> None:
    num_pinned = llm.cache.pin(SYSTEM)
    assert num_pinned == len(llm.encode(SYSTEM)) and llm.stats()["cache"]["pins"] == 1
    flood(llm)
    assert llm.generate(SYSTEM + "hello", greedy())[0].num_cached_tokens == num_pinned
    llm.cache.unpin(SYSTEM)
    flood(llm)
    assert llm.generate(SYSTEM + "hello", greedy())[0].num_cached_tokens < num_pinned
    with pytest.raises(PinError, match="not pinned"):
        llm.cache.unpin(SYSTEM)


def test_pin_messages_serve_a_chat_that_begins_with_them(llm: LLM) -> None:
    system = {"role": "system", "content": "be brief"}
    num_pinned = llm.cache.pin([system])
    out = llm.chat([system, {"role": "user", "content": "hi"}], greedy())[0]
    assert out.num_cached_tokens >= num_pinned


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan"), float("inf"), "1"])
def test_pin_bad_time_to_live_is_refused_before_anything_is_computed(llm: LLM, ttl_s: object) -> None:
    before = llm.stats()["tokens"]["computed"]
    with pytest.raises(PinError, match="ttl_s="):
        llm.cache.pin(SYSTEM, ttl_s)
    assert llm.stats()["tokens"]["computed"] == before


def test_pin_beyond_the_budget_names_the_numbers(llm: LLM) -> None:
    llm.cache.pin("a" * 100)
    budget = llm.prefix_cache.pins.max_pages
    with pytest.raises(PinError, match=f"{budget}"):
        for i in range(20):
            llm.cache.pin(f"{i}" * 100)
    assert llm.prefix_cache.pins.num_pages <= budget
    assert llm.generate("x" * 60, greedy())[0].error is None
    with pytest.raises(PinError, match="no tokens"):
        llm.cache.pin([])


def test_evict_and_clear_leave_pins_and_count_pages(llm: LLM) -> None:
    llm.generate([SYSTEM + "one", SYSTEM + "two"], greedy())
    assert llm.cache.evict(SYSTEM + "one") > 0
    assert llm.generate(SYSTEM + "two", greedy())[0].num_cached_tokens == len(llm.encode(SYSTEM + "two")) - 1
    assert llm.cache.evict("never seen") == 0
    llm.cache.pin(SYSTEM)
    assert llm.cache.clear() > 0
    assert llm.cache.explain(SYSTEM + "z").num_cached_tokens == len(llm.encode(SYSTEM))
    assert llm.cache.clear(unpin=True) > 0 and llm.stats()["pool"]["cached"] == 0


def test_clear_while_requests_run_is_refused_and_changes_nothing(llm: LLM) -> None:
    stream = llm.stream(SYSTEM + "go on", greedy(20))
    text = [next(stream).text]
    with pytest.raises(EngineError, match="1 requests are running"):
        llm.cache.clear()
    text += [delta.text for delta in stream]
    assert "".join(text) == llm.generate(SYSTEM + "go on", greedy(20))[0].outputs[0].text


def test_cache_off_pins_nothing(folder: Path, compiled: Path) -> None:  # noqa: F811
    with open_llm(folder, compiled, enable_prefix_caching=False) as llm:
        with pytest.raises(PinError, match="off"):
            llm.cache.pin(SYSTEM)


@pytest.mark.parametrize("host_cache_bytes", [None, 2**18])
def test_snapshot_new_process_finds_every_token(folder: Path, compiled: Path, tmp_path: Path,  # noqa: F811
                                                host_cache_bytes: int | None) -> None:
    prompts = [SYSTEM + text for text in ("first", "second question", "third")]
    with open_llm(folder, compiled, host_cache_bytes=host_cache_bytes) as llm:
        expected = llm.generate(prompts, greedy(8))
        secret = llm.generate(prompts[:1], greedy(8, cache_namespace=("team", 1)))
        if host_cache_bytes:
            flood(llm)
        assert llm.cache.save(tmp_path / "saved") > 0
    with open_llm(folder, compiled, load_cache=tmp_path / "saved", host_cache_bytes=host_cache_bytes,
                  kv_cache_bytes=2**19) as llm:
        again = llm.generate(prompts, greedy(8))
        assert [out.num_cached_tokens for out in again] == [len(llm.encode(prompt)) - 1 for prompt in prompts]
        assert [out.outputs[0].token_ids for out in again] == [out.outputs[0].token_ids for out in expected]
        hidden = llm.generate(prompts[:1], greedy(8, cache_namespace=("team", 1)))[0]
        assert hidden.num_cached_tokens == len(llm.encode(prompts[0])) - 1
        assert hidden.outputs[0].token_ids == secret[0].outputs[0].token_ids
        llm.engine.check_invariants()


def test_snapshot_of_another_model_is_refused_by_name(folder: Path, compiled: Path, tmp_path: Path,  # noqa: F811
                                                      llm: LLM) -> None:
    llm.generate([SYSTEM], greedy())
    llm.cache.save(tmp_path / "saved")
    save_model(tmp_path / "other")
    shard = next((tmp_path / "other").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(SnapshotError, match="weights"):
        open_llm(tmp_path / "other", compiled, load_cache=tmp_path / "saved")
    with pytest.raises(SnapshotError, match="page_size"):
        open_llm(folder, compiled, load_cache=tmp_path / "saved", page_size=8)
    with pytest.raises(SnapshotError):
        open_llm(folder, compiled, load_cache=tmp_path / "nothing here")


def test_snapshot_damaged_leaves_the_cache_as_it_was(llm: LLM, tmp_path: Path) -> None:
    prompts = [SYSTEM + "a", "something else entirely"]
    llm.generate(prompts, greedy())
    llm.cache.save(tmp_path / "saved")
    chunk = max((path for path in (tmp_path / "saved").rglob("*") if path.is_file()),
                key=lambda path: path.stat().st_size)
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 4
    chunk.write_bytes(bytes(content))
    llm.cache.clear()
    llm.generate(prompts[:1], greedy())
    before = str(llm.cache)
    with pytest.raises(SnapshotError, match=str(tmp_path / "saved")):
        llm.cache.load(tmp_path / "saved")
    llm.engine.check_invariants()
    assert str(llm.cache) == before
    assert llm.generate(prompts[:1], greedy())[0].num_cached_tokens == len(llm.encode(prompts[0])) - 1


def test_host_tier_larger_than_the_machine_names_both_numbers(folder: Path, compiled: Path) -> None:  # noqa: F811
    with pytest.raises(DeviceError, match="host_cache_bytes=.*available"):
        open_llm(folder, compiled, host_cache_bytes=2**50)
    with pytest.raises(ValueError, match="host_cache_bytes=1"):
        open_llm(folder, compiled, host_cache_bytes=1)


@pytest.mark.parametrize("option", [dict(eviction_policy="fifo"), dict(min_ttl_s=-1.0), dict(max_pinned_fraction=1.5),
                                    dict(batch_order="random"), dict(max_wait_s=float("nan"))])
def test_bad_cache_option_is_named(folder: Path, compiled: Path, option: dict) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=next(iter(option))):
        open_llm(folder, compiled, **option)


def test_explain_and_pictures_name_what_is_there(llm: LLM) -> None:
    llm.generate([SYSTEM + "what is a tree?"], greedy())
    explanation = llm.cache.explain(SYSTEM + "what is a page?")
    assert explanation.num_cached_tokens == len(llm.encode(SYSTEM + "what is a "))
    assert "page" in str(explanation) and "tree" in str(explanation)
    assert "helpful" in str(llm.cache)
    assert ElementTree.fromstring(str(llm.cache.show())).tag.endswith("svg")
    assert llm.cache._repr_html_().startswith("<svg")
    with pytest.raises(RequestError):
        llm.cache.explain(["no", "ids"])


def test_output_says_what_the_cache_did(llm: LLM) -> None:
    first, second = (llm.generate([SYSTEM], greedy())[0] for _ in range(2))
    assert str(first.cache) == "0 tokens from the cache"
    assert second.cache.num_cached_tokens == second.num_cached_tokens == len(llm.encode(SYSTEM)) - 1
    assert "in a copied page" in str(second.cache)
    assert "cached prompt" in str(llm.stats()) and json.loads(json.dumps(llm.stats()))["pool"]["page_size"] == 4


def test_batch_order_small_pool_computes_each_prefix_once(folder: Path, compiled: Path) -> None:  # noqa: F811
    """Groups interleaved, as in the thrash workload: depth first each prefix is computed once, in order it is not."""
    prompts = [chr(33 + group) * 40 + f"{number}" for number in range(3) for group in range(40)]
    computed = {}
    for order in ("depth_first", "arrival"):
        with open_llm(folder, compiled, batch_order=order, kv_cache_bytes=2**14, max_num_seqs=2) as llm:
            outputs = llm.generate(prompts, greedy(2))
            assert [out.prompt for out in outputs] == prompts
            computed[order] = llm.stats()["tokens"]["computed_prompt"], [out.outputs[0].token_ids for out in outputs]
    assert computed["depth_first"][0] == 40 * 40 + 120
    assert computed["arrival"][0] > 2 * computed["depth_first"][0]
    assert computed["arrival"][1] == computed["depth_first"][1]


# -- deterministic=True


@pytest.fixture(scope="module")
def fixed(folder: Path, compiled: Path) -> Iterator[LLM]:  # noqa: F811
    with open_llm(folder, compiled, deterministic=True, prefill_chunk_tokens=16, dtype="auto") as llm:
        yield llm


def test_deterministic_never_measures_and_gives_one_text_the_same_bits(fixed: LLM) -> None:
    assert fixed.memory_plan and fixed._runner.kv.k[0].dtype == "float32"
    assert not fixed.config.jump_decoding and not fixed.config.shared_attention
    fixed.cache.clear()
    texts = [SYSTEM + question for question in ("who?", "what?", "when?")]
    first = fixed.generate(texts, greedy(6, logprobs=2))
    again = fixed.generate(texts[::-1], greedy(6, logprobs=2))[::-1]
    assert [output.outputs[0].logprobs for output in first] == [output.outputs[0].logprobs for output in again]
    assert all(output.num_cached_tokens % 16 == 0 and output.num_cached_tokens > 0 for output in again)


def test_deterministic_explain_says_what_was_rounded_down(fixed: LLM) -> None:
    fixed.cache.clear()
    fixed.generate(["a" * 32], greedy(2))
    explanation = fixed.cache.explain("a" * 28 + "b")
    assert explanation.num_cached_tokens == 16 and explanation.granularity == 16
    assert explanation.num_unused_tokens == 12
    assert "The next 12 tokens are known and not used: with deterministic=True hits are multiples of 16" in str(
        explanation)
    assert explanation.num_new_tokens == 1
    assert fixed.cache.explain("a" * 12 + "b" * 3).reason == "rounded down"


@pytest.mark.parametrize("length, num_pinned", [(12, 0), (16, 16), (20, 16), (44, 32)])
def test_deterministic_pin_protects_whole_chunks(fixed: LLM, length: int, num_pinned: int) -> None:
    fixed.cache.clear()
    assert fixed.cache.pin("p" * length) == num_pinned
    assert fixed.stats()["cache"]["pinned_pages"] == num_pinned // 4
    flood(fixed)
    output, = fixed.generate(["p" * length + "q"], greedy(1))
    assert output.num_cached_tokens == num_pinned
    fixed.cache.unpin("p" * length)
    assert fixed.stats()["cache"]["pins"] == 0


def test_deterministic_snapshot_is_refused_by_other_engines(fixed: LLM, llm: LLM, tmp_path: Path) -> None:
    fixed.generate([SYSTEM], greedy(2))
    fixed.cache.save(tmp_path / "snapshot")
    with pytest.raises(SnapshotError, match="give the LLM the same deterministic, prefill_chunk_tokens"):
        llm.load_cache(tmp_path / "snapshot")
    assert fixed.fingerprint != llm.fingerprint


@pytest.mark.parametrize("options, text", [
    (dict(decode_steps=2), "decode_steps=2 with deterministic=True"),
    (dict(grammar_start="matcher"), "how fast it is compiled"),
    (dict(prefill_chunk_tokens=18), "expected a multiple of page_size=4")])
def test_deterministic_with_what_it_excludes_is_refused(folder: Path, compiled: Path, options: dict,  # noqa: F811
                                                        text: str) -> None:
    with pytest.raises(ValueError, match=text):
        open_llm(folder, compiled, deterministic=True, **options)
