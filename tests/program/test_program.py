"""Programs on a tiny model: the text and tokens they write, waiting, forks, batches, errors, streams."""
from __future__ import annotations

import itertools
import threading

import pytest

import jradix
from jradix import LLM, SamplingParams, gen, select
from jradix.errors import EngineError, ProgramError, RequestError

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


@jradix.function
def two_parts(s, question):
    s += "Q: " + question + "\nA:"
    s += gen("first", max_tokens=5, ignore_eos=True)
    s += " so"
    s += gen("second", max_tokens=4, ignore_eos=True)
    return len(s["first"])


def test_run_two_parts_are_what_generate_gives_for_the_same_tokens(llm: LLM) -> None:
    s = two_parts.run("why", llm=llm)
    first = llm.generate("Q: why\nA:", SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert s["first"] == first.outputs[0].text and s.result == len(s["first"])
    tokens = [*first.prompt_token_ids, *first.outputs[0].token_ids, *b" so"]
    second = llm.generate([tokens], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert s["second"] == second.outputs[0].text
    assert s.text() == "Q: why\nA:" + s["first"] + " so" + s["second"]
    assert s.token_ids() == [*tokens, *second.outputs[0].token_ids]


def test_run_second_part_finds_all_of_the_first_but_its_newest_token_in_the_cache(llm: LLM) -> None:
    before = llm.stats()["tokens"]["computed_prompt"]
    s = two_parts.run("why", llm=llm)
    num_prompt = len("Q: why\nA:")
    # the last sampled token's KV is not there yet; with it the text in between is computed
    assert llm.stats()["tokens"]["computed_prompt"] - before == num_prompt + 1 + len(" so")
    assert s.output("second").token_ids


def test_text_in_pieces_is_encoded_as_the_same_text_in_one(llm: LLM) -> None:
    s = jradix.start(llm, SHORT)
    for piece in ("<|im_", "start|>us", "er ", "x"):
        s += piece
    s += gen("a")
    assert s.token_ids()[:-6] == llm.encode("<|im_start|>user x")


def test_chat_blocks_have_the_tokens_of_render_chat(llm: LLM) -> None:
    s = jradix.start(llm, SHORT)
    s.system("be <|im_end|> brief")
    s.user("hi")
    s.assistant(gen("a"))
    messages = [{"role": "system", "content": "be <|im_end|> brief"}, {"role": "user", "content": "hi"}]
    assert s.messages()[:2] == messages
    assert s.token_ids()[:-6] == llm.render_chat(messages)
    s.user("and?")
    s.assistant(gen("b"))
    said = s.output("a").token_ids
    rest = "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert s.token_ids()[:-6] == [*llm.render_chat(messages), *said, *llm.encode(rest)]
    assert [m["role"] for m in s.messages()] == ["system", "user", "assistant", "user", "assistant"]
    assert s.messages()[2]["content"] == s["a"] and s.text().endswith(s["b"] + "<|im_end|>\n")


def test_chat_block_as_with_statement_takes_text_and_parts(llm: LLM) -> None:
    s, t = jradix.start(llm, SHORT), jradix.start(llm, SHORT)
    with s.user():
        s += "h"
        s += "i"
    with s.assistant():
        s += "I "
        s += gen("a")
    t.user("hi")
    t.assistant("I ", gen("a"))
    assert s.text() == t.text() and s.token_ids() == t.token_ids()
    s += "raw"
    assert s.text().endswith("<|im_end|>\nraw")


def test_gen_with_stop_text_keeps_only_tokens_before_it(llm: LLM) -> None:
    s = jradix.start(llm)
    s += "abc"
    s += gen("free", max_tokens=12, ignore_eos=True)
    stop = s["free"][4:6]
    t = jradix.start(llm)
    t += "abc"
    t += gen("cut", max_tokens=12, ignore_eos=True, stop=stop)
    assert t["cut"] == s["free"][:s["free"].index(stop)]
    assert llm.tokenizer.decode(t.token_ids()) == "abc" + t["cut"]


def test_gen_dtype_gives_values_of_the_type(llm: LLM) -> None:
    s = jradix.start(llm)
    s += "n = "
    s += gen("n", dtype=int, max_tokens=30)
    s += gen("x", dtype=float, max_tokens=60)
    s += gen("b", dtype=bool, max_tokens=30)
    s += gen("j", json_schema={"type": "object", "properties": {"k": {"enum": [1, 2]}}, "required": ["k"],
                               "additionalProperties": False}, max_tokens=60)
    s += gen("c", choices=["red", "green"], max_tokens=20)
    assert type(s["n"]) is int and type(s["x"]) is float and type(s["b"]) is bool
    assert s["j"] in ({"k": 1}, {"k": 2}) and s["c"] in ("red", "green")


def test_gen_cut_off_inside_its_grammar_has_no_value_and_says_why(llm: LLM) -> None:
    s = jradix.start(llm)
    s += "x"
    s += gen("j", json_schema={"type": "string", "minLength": 40}, max_tokens=5)
    with pytest.raises(ProgramError, match=r"s\['j'\].*max_tokens=5"):
        s["j"]
    assert s.output("j").finish_reason == "length" and s.error is None


def test_fork_computes_the_common_text_once_and_each_goes_on_by_itself(llm: LLM) -> None:
    s = jradix.start(llm, SHORT)
    s += "one two three four five six seven eight nine ten."
    before = llm.stats()["tokens"]["computed_prompt"]
    forks = s.fork(5)
    for i, fork in enumerate(forks):
        fork += f" {i}:"
        fork += gen("x", seed=1)
    forks.join()
    computed = llm.stats()["tokens"]["computed_prompt"] - before
    shared = "one two three four five six seven eight nine ten. "
    assert computed == len(shared) + 5 * len("0:")
    assert s["x"] == [fork["x"] for fork in forks]
    for i, fork in enumerate(forks):
        alone = llm.generate(shared + f"{i}:", SHORT)[0].outputs[0].text
        assert fork["x"] == alone
    assert "x" not in s.copy()._slots


def test_fork_waits_for_what_is_being_generated(llm: LLM) -> None:
    s = jradix.start(llm, SHORT)
    s += "abc"
    s += gen("x")
    fork = s.fork(1)[0]
    assert fork["x"] == s["x"] and fork.text() == s.text()
    fork += "!"
    assert not s.text().endswith("!")


def test_fork_inside_a_message_goes_on_in_that_message(llm: LLM) -> None:
    s = jradix.start(llm, SHORT)
    s.user("hi")
    with s.assistant():
        s += "I think "
        forks = s.fork(2)
    for fork in forks:
        fork += gen("x")
        fork.user("more")
        assert fork.text().endswith(fork["x"] + "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n")
    assert forks[0].messages()[1]["content"] == "I think " + forks[0]["x"]
    assert forks[0].messages()[2] == {"role": "user", "content": "more"}


@pytest.mark.parametrize("method", ["token_length_normalized", "greedy", "unconditional"])
def test_select_scores_are_those_of_llm_score(llm: LLM, method: str) -> None:
    choices = ["a", "ab", "xyz"]
    s = jradix.start(llm)
    s += "the word is "
    s += select("w", choices, method=method)
    scored = llm.score("the word is ", choices)
    assert s.logprobs("w") == pytest.approx({c: each.logprob for c, each in zip(choices, scored)}, abs=1e-4)
    means = {c: each.logprob / len(each.logprobs) for c, each in zip(choices, scored)}
    if method == "token_length_normalized":
        assert s["w"] == max(means, key=means.get)
    elif method == "unconditional":
        alone = llm.score("<s>", choices)
        gains = {c: (a.logprob - b.logprob) / len(a.logprobs) for c, a, b in zip(choices, scored, alone)}
        assert s["w"] == max(gains, key=gains.get) and s.scores("w") == pytest.approx(gains, abs=1e-4)
    else:
        first = {c: each.logprobs[0] for c, each in zip(choices, scored)}
        assert s["w"][0] == max(first, key=first.get)[0]
    assert s.text() == "the word is " + s["w"]


def test_select_computes_the_text_before_the_choices_once(llm: LLM) -> None:
    s = jradix.start(llm)
    s += "one two three four five six seven "
    before = llm.stats()["tokens"]["computed_prompt"]
    s += select("w", ["abc", "abd", "x"])
    assert s["w"] in ("abc", "abd", "x")
    # each choice but the first needs the logits from the token before it on: " abd" and " x"
    assert llm.stats()["tokens"]["computed_prompt"] - before == len("one two three four five six seven abc") + 4 + 2


def test_run_batch_keeps_order_and_shares_steps(llm: LLM) -> None:
    calls = [dict(question=f"number {i}") for i in range(20)]
    alone = [two_parts.run(llm=llm, **call)["second"] for call in calls]
    llm.cache.clear()
    before = llm.stats()["steps"]
    states = two_parts.run_batch(calls, llm=llm)
    num_steps = llm.stats()["steps"] - before
    assert [s["second"] for s in states] == alone
    assert num_steps < 20 * 9 / 3                # 8 rows at a time: far fewer than one program after the other
    by_place, alone = two_parts.run_batch(["a", ("b",)], llm=llm), two_parts.run("b", llm=llm)
    assert by_place[1].text() == alone.text() and by_place[0].text().startswith("Q: a\nA:")


def test_run_batch_uses_one_thread_for_all_programs(llm: LLM) -> None:
    seen = set()

    @jradix.function
    def where(s, i):
        seen.add(threading.get_ident())
        s += f"{i}"
        s += gen("x")
        assert s["x"] is not None
        seen.add(threading.get_ident())

    num_threads = threading.active_count()
    where.run_batch(range(30), llm=llm, params=SHORT)
    assert seen == {threading.get_ident()} and threading.active_count() == num_threads


def test_run_batch_failed_program_is_a_record_with_its_text(llm: LLM) -> None:
    @jradix.function
    def divide(s, n):
        s += f"1 / {n} ="
        s += gen("x")
        s["x"]
        return 1 / n

    states = divide.run_batch([1, 0, 2], llm=llm, params=SHORT)
    assert [s.result for s in states] == [1.0, None, 0.5]
    assert states[1].error == "ZeroDivisionError: division by zero"
    assert states[1].text_so_far.startswith("1 / 0 =") and isinstance(states[1].cause, ZeroDivisionError)
    with pytest.raises(ProgramError, match="division by zero") as caught:
        divide.run(0, llm=llm, params=SHORT)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) and caught.value.text.startswith("1 / 0 =")


def test_run_program_that_fails_ends_its_requests(llm: LLM) -> None:
    @jradix.function
    def leave(s):
        for fork in s.fork(4):
            fork += "abc"
            fork += gen("x", max_tokens=200, ignore_eos=True)
        raise ValueError("enough")

    with pytest.raises(ProgramError, match="ValueError: enough"):
        leave.run(llm=llm)
    assert llm.num_unfinished == 0


def test_run_prompt_over_the_limit_fails_with_the_reason(llm: LLM) -> None:
    @jradix.function
    def long(s):
        s += "x" * 600
        s += gen("y")
        return s["y"]

    with pytest.raises(ProgramError, match=r"gen\('y'\): prompt of 600 tokens, but max_model_len=512") as caught:
        long.run(llm=llm)
    assert caught.value.text == "x" * 600


def test_run_waits_for_parts_that_nobody_read(llm: LLM) -> None:
    forks = []

    @jradix.function
    def careless(s):
        s += "abc"
        forks.extend(s.fork(2))
        for fork in forks:
            fork += gen("x")
        s += gen("y")

    s = careless.run(llm=llm, params=SHORT)
    assert len(s["y"]) and all(fork.text_so_far.startswith("abc") and fork["x"] for fork in forks)
    assert llm.num_unfinished == 0


def test_run_program_inside_a_program_writes_into_its_text(llm: LLM) -> None:
    @jradix.function
    def ask(s, what):
        s += what
        s += gen(what)

    @jradix.function
    def both(s):
        ask(s, "one")
        ask(s, "two")
        return s["one"] + s["two"]

    s = both.run(llm=llm, params=SHORT)
    assert s.text() == "one" + s["one"] + "two" + s["two"]


def test_stream_gives_the_text_in_order_and_the_state_at_the_end(llm: LLM) -> None:
    deltas = list(two_parts.stream("why", llm=llm))
    s = deltas[-1].state
    assert "".join(d.text for d in deltas) == s.text()
    assert [name for name, _ in itertools.groupby(d.name for d in deltas[:-1])] == [None, "first", None, "second"]
    assert sum(d.name == "first" for d in deltas) > 1
    assert all(d.state is None for d in deltas[:-1])


def test_stream_closed_early_ends_the_program(llm: LLM) -> None:
    ended = []

    @jradix.function
    def endless(s):
        try:
            while True:
                s += "a"
                s += gen("x")
                s["x"]
        finally:
            ended.append(True)

    stream = endless.stream(llm=llm, params=SHORT)
    next(stream), next(stream)
    stream.close()
    assert ended == [True] and llm.num_unfinished == 0


def test_run_batch_engine_failure_carries_what_had_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch, calls = llm._runner.dispatch, itertools.count()

    def fail_late(*args: object, **kwargs: object) -> object:
        if next(calls) == 25:
            raise RuntimeError("no power")
        return dispatch(*args, **kwargs)

    monkeypatch.setattr(llm._runner, "dispatch", fail_late)
    with pytest.raises(EngineError, match="no power") as caught:
        two_parts.run_batch([f"{i}" for i in range(30)], llm=llm)
    done = [s for s in caught.value.partial_results if s is not None]
    assert 0 < len(done) < 30 and all(s["second"] for s in done)
    monkeypatch.undo()
    assert two_parts.run("again", llm=llm)["second"]


def test_run_batch_interrupt_ends_the_programs_and_leaves_a_usable_engine(llm: LLM) -> None:
    ended = []

    @jradix.function
    def interrupted(s, i):
        try:
            s += f"{i}"
            s += gen("x")
            s["x"]
            if i == 3:
                raise KeyboardInterrupt
        finally:
            ended.append(i)

    with pytest.raises(KeyboardInterrupt):
        interrupted.run_batch(range(40), llm=llm, params=SHORT, max_live=6)
    assert llm.num_unfinished == 0 and 3 in ended and len(ended) <= 9
    assert two_parts.run("again", llm=llm)["second"]


def test_state_pinned_text_stays_in_a_full_cache(llm: LLM) -> None:
    s = jradix.start(llm, SHORT)
    s += "keep this text, all of it."
    with s.pinned():
        assert llm.stats()["cache"]["pins"] == 1
        s += gen("x")
        assert s["x"]
    assert llm.stats()["cache"]["pins"] == 0


def test_state_pinned_leaves_the_users_own_pin_of_the_same_text(llm: LLM) -> None:
    s = jradix.start(llm, SHORT)
    s += "keep this text, all of it."
    with s.pinned():
        ids = next(iter(llm.prefix_cache.pins._pins)).tokens.tolist()
        llm.cache.pin(ids)
        assert llm.stats()["cache"]["pins"] == 2
    assert llm.stats()["cache"]["pins"] == 1
    with s.pinned():
        llm.cache.clear(unpin=True)
    assert llm.stats()["cache"]["pins"] == 0


@pytest.mark.parametrize("make, message", [
    (lambda: gen("x", n=2), "use s.fork"),
    (lambda: gen("x", max_token=2), "unknown setting 'max_token'"),
    (lambda: gen("x", temperature=-1), "temperature"),
    (lambda: gen("x", dtype=list), "expected int, float, bool or str"),
    (lambda: gen("x", dtype=int, regex="a"), "with regex"),
    (lambda: gen(5), "expected a name"),
    (lambda: select("x", []), "expected a list of texts"),
    (lambda: select("x", "ab"), "expected a list of texts"),
    (lambda: select("x", ["a", "a"]), "stands twice"),
    (lambda: select("x", ["a"], method="best"), "expected one of"),
    (lambda: jradix.function(lambda: None), "the state as first parameter"),
    (lambda: jradix.function(lambda s, llm: None), "none named"),
])
def test_parts_wrong_arguments_are_refused_when_they_are_made(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_state_misuse_is_named(llm: LLM) -> None:
    s = jradix.start(llm, SHORT)
    with pytest.raises(ValueError, match="expected a text, gen"):
        s += 5
    with pytest.raises(KeyError, match="no part named 'x'"):
        s["x"]
    with pytest.raises(ValueError, match="positive number"):
        s.fork(0)
    with pytest.raises(ValueError, match="inside a message by 'user'"):
        with s.user():
            s.assistant("a")
    s += select("w", ["a", "b"])
    with pytest.raises(ValueError, match="this is a select"):
        s.output("w")
    with pytest.raises(ProgramError, match="no text before the choices"):
        t = jradix.start(llm)
        t += select("w", ["a", "b"])
        t["w"]
    with pytest.raises(ValueError, match="expected a state"):
        two_parts(llm, "why")
    with pytest.raises(ValueError, match="not asked for"):
        s += gen("y")
        s.logprobs("y")


def test_chat_block_template_that_refuses_a_role_raises_request_error(llm: LLM, monkeypatch: pytest.MonkeyPatch
                                                                      ) -> None:
    monkeypatch.setattr(llm.tokenizer.fast, "chat_template", "{{ raise_exception('no system here') }}")
    with pytest.raises(RequestError, match="no system here"):
        jradix.start(llm).system("x")
