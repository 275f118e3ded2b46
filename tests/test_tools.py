"""Tools: what is given, how each family writes calls, and answers of random models, which would never write one."""
from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jsonschema
import pytest

import smollm
from jradix import LLM, SamplingParams, ToolCall, compile_grammar
from jradix.batch_job import run_batch
from jradix.errors import GrammarError, RequestError
from jradix.lint import load_tokenizer
from jradix.outputs import CompletionOutput, RequestOutput
from jradix.tool_formats import FORMATS, calls_grammar, find_format, opens_call, read_calls, without_special_tokens
from jradix.tool_turn import check_shows_tools, function_tool
from jradix.tools import read_tools, with_argument_objects
from toy_engine import assert_idle
from toy_models import make_checkpoint
from toy_tokenizers import make_chat_tokenizer

MODEL = dict(vocab_size=272, num_hidden_layers=1, max_position_embeddings=2048, bos_token_id=256, eos_token_id=258)
SIZES = dict(dtype="float32", max_num_seqs=1, prefill_chunk_tokens=32, page_size=8, kv_cache_bytes=2**20, quiet=True,
             grammar_bytes=2**18, grammar_workers=0, shared_attention=False)     # few shapes, so little to compile
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a day.", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1,
                                                                                  "maximum": 9}},
    "required": ["city", "days"]}}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
ASKED = [{"role": "user", "content": "Weather?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}

SYSTEM = ("{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}{{ ' ' }}{{ tool | tojson }}{% endfor %}"
          "<|im_end|>{% endif %}")
TURN_HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}{{ '\n' }}{{ m.content or '' }}"
TURN_TAIL = "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
HERMES = (SYSTEM + TURN_HEAD + "{% for call in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}"
          "{% endif %}<tool_call>{{ '\n' }}{\"name\": \"{{ call.function.name }}\", \"arguments\": "
          "{{ call.function.arguments | tojson }}}{{ '\n' }}</tool_call>{% endfor %}" + TURN_TAIL)
MISTRAL = (SYSTEM + TURN_HEAD + "{% if m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}{{ call.function | "
           "tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}" + TURN_TAIL)
LLAMA = SYSTEM + 'Respond in the format {"name": function name, "parameters": dictionary of argument name}.' + \
    TURN_HEAD + TURN_TAIL


def written(form: str, calls: list[tuple[str, dict]], text: str = "") -> str:
    """A turn as the documentation of each family spells it."""
    key = "parameters" if form == "llama" else "arguments"
    each = [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]
    if form == "hermes":
        return text + "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in each)
    if form.startswith("mistral"):
        return f"{text}[TOOL_CALLS]{' ' if form == 'mistral' else ''}[{', '.join(each)}]"
    return "\n".join(each)


# -- what is given

@pytest.mark.parametrize("tools, choice, parallel, words", [
    ([], None, None, "at least one tool"), ({}, None, None, "expected a list"), ("f", None, None, "expected a list"),
    ([{"name": "f"}], None, None, r"tools\[0\]=.*expected \{\"type\": \"function\""),
    ([{"type": "function"}], None, None, r"tools\[0\]"), ([CLOCK, 3], None, None, r"tools\[1\]=3"),
    ([{"type": "function", "function": {"name": "a b"}}], None, None, "name='a b'"),
    ([{"type": "function", "function": {"name": "f" * 65}}], None, None, "at most 64"),
    ([{"type": "function", "function": {"name": None}}], None, None, "name='None'"),
    ([{"type": "function", "function": {"name": "f", "description": 3}}], None, None, "description=3"),
    ([{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}], None, None, r"\(f\).*object"),
    ([{"type": "function", "function": {"name": "f", "parameters": "x"}}], None, None, "parameters=x"),
    ([CLOCK, WEATHER, CLOCK], None, None, r"tools\[2\].*'clock' is also that of tools\[0\]"),
    (TOOLS, "any", None, "tool_choice='any'"), (TOOLS, "clock", None, r'to name a function, give \{"type"'),
    (TOOLS, {"type": "function", "function": {"name": "time"}}, None, "'time', which is none of.*get_weather, clock"),
    (TOOLS, {"name": "clock"}, None, "expected \"auto\""), (TOOLS, None, 1, "parallel_tool_calls=1"),
    (None, "auto", None, "tool_choice=auto without tools"), (None, NAMED, None, "without tools"),
    (None, None, True, "parallel_tool_calls without tools")])
def test_malformed_tools_are_refused_by_name(tools: Any, choice: Any, parallel: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        read_tools(tools, choice, parallel)


def test_choice_decides_what_may_be_called() -> None:
    assert read_tools(None) is None is read_tools(None, "none")
    names = {str(choice): [tool.name for tool in read_tools(TOOLS, choice).callable]
             for choice in (None, "auto", "required", NAMED)}
    assert names == {"None": ["get_weather", "clock"], "auto": ["get_weather", "clock"],
                     "required": ["get_weather", "clock"], str(NAMED): ["get_weather"]}
    assert read_tools(TOOLS, NAMED).mode == "required" and not read_tools(TOOLS, NAMED).is_parallel
    assert read_tools(TOOLS, NAMED).definitions[0] == WEATHER, "the template goes on showing all of them"


def test_function_becomes_a_tool_of_its_signature_and_docstring() -> None:
    def get_weather(city: str, unit: Annotated[Literal["C", "F"], "of the answer"] = "C") -> str:
        """Weather of today.

        Args:
            city: Where, in English.
        """
    assert function_tool(get_weather) == {"type": "function", "function": {
        "name": "get_weather", "description": "Weather of today.", "parameters": {
            "type": "object", "additionalProperties": False, "required": ["city"], "properties": {
                "city": {"type": "string", "description": "Where, in English."},
                "unit": {"enum": ["C", "F"], "description": "of the answer"}}}}}
    with pytest.raises(GrammarError, match="'x' has no annotation"):
        function_tool(lambda x: x)


def test_argument_texts_of_messages_become_objects() -> None:
    message = CompletionOutput(tool_calls=[ToolCall("abc", "f", {"a": "\u00e9"})]).as_message()
    assert message["content"] is None and message["tool_calls"][0]["function"]["arguments"] == '{"a": "\u00e9"}'
    changed = with_argument_objects([*ASKED, message])
    assert changed[0] == ASKED[0] and changed[1]["tool_calls"][0]["function"]["arguments"] == {"a": "\u00e9"}
    for text in ("{", "3"):
        message["tool_calls"][0]["function"]["arguments"] = text
        with pytest.raises(RequestError, match=r"messages\[1\]\.tool_calls\[0\]: arguments="):
            with_argument_objects([*ASKED, message])


# -- how each family writes

@pytest.mark.parametrize("template, name", [(HERMES, "hermes"), (MISTRAL, "mistral"), (LLAMA, "llama"),
                                            (MISTRAL.replace("] [", "]["), "mistral-nemo"), (SYSTEM, "json")])
def test_format_is_found_from_the_template(template: str, name: str) -> None:
    assert find_format(template).name == name
    with pytest.raises(RequestError, match=r"writes tool calls with '<function='"):
        find_format(template + "<function=name>")


CALLS = [[("clock", {})], [("get_weather", {"city": "Oslo", "days": 3}), ("clock", {})],
         [("f", {"nested": {"list": [1, [True, None]], "\u00fcber": '</tool_call>"]\\\n\U0001f600'}, "x": 1.5})]]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("calls", CALLS, ids=["empty", "two", "nested"])
def test_calls_are_read_as_they_were_written(form: str, calls: list) -> None:
    if form == "llama":
        calls = calls[:1]
    names = {"clock", "get_weather", "f"}
    assert read_calls(FORMATS[form], written(form, calls), names) == ("", calls)
    if FORMATS[form].mark:
        assert read_calls(FORMATS[form], written(form, calls, "Let me\nlook.\n"), names) == ("Let me\nlook.", calls)
    else:
        assert read_calls(FORMATS[form], "<|python_tag|>" + written(form, calls), names) == ("", calls)


@pytest.mark.parametrize("form, text", [
    ("hermes", "plain"), ("hermes", '{"name": "clock", "arguments": {}}'), ("llama", 'see {"name": "clock"}'),
    ("llama", ""), ("json", '["name"]'), ("mistral", '[{"name": "clock", "arguments": {}}]')])
def test_text_without_a_mark_is_text(form: str, text: str) -> None:
    assert read_calls(FORMATS[form], text, {"clock"}) == (text, []) and not opens_call(FORMATS[form], text)


@pytest.mark.parametrize("form, text, words", [
    ("hermes", "<tool_call>", "no JSON"), ("hermes", "<tool_call>\n3\n</tool_call>", "expected an object"),
    ("hermes", '<tool_call>\n{"name": "clock", "arguments": {}}', "malformed"),
    ("hermes", '<tool_call>{"name": "clock", "arguments": {}}</tool_call> and', "malformed"),
    ("hermes", '<tool_call>{"name": "time", "arguments": {}}</tool_call>', "'time', which is none of the tools"),
    ("hermes", '<tool_call>{"name": ["clock"], "arguments": {}}</tool_call>', "none of the tools"),
    ("hermes", '<tool_call>{"name": "clock", "arguments": "{}"}</tool_call>', "expected an object"),
    ("hermes", '<tool_call>{"name": "clock", "parameters": {}}</tool_call>', "expected an object"),
    ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>', "NaN"),
    ("hermes", '<tool_call>{"name": "clock", "arguments": ' + '{"a":' * 9999, "no JSON|too deeply"),
    ("llama", '{"name": "clock", "parameters": {}} {"name": "clock", "parameters": {}}', "malformed"),
    ("llama", '{"name": "clock", "par', "no JSON"), ("mistral", '[TOOL_CALLS] {"name"', "malformed"),
    ("mistral", '[TOOL_CALLS] [{"name": "clock", "arguments": {}}', "malformed"),
    ("mistral", '[TOOL_CALLS] [{"name": "clock", "arguments": {}},', "no JSON"),
    ("json", '{"name": "clock", "arguments": {}}\nthen', "no JSON")])
def test_malformed_calls_are_an_error_that_says_why(form: str, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_calls(FORMATS[form], text, ["clock"])


GOOD = [("get_weather", {"city": "Rome", "days": 9})]
BAD = [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Rome", "days": 10}), ("clock", {"x": 1}),
       ("get_weather", {"city": "Rome", "days": 1, "more": 1}), ("time", {})]


def accepts(form: str, text: str, choice: Any = None, parallel: bool | None = None) -> bool:
    tools = read_tools(TOOLS, choice, parallel)
    return compile_grammar(grammar=calls_grammar(FORMATS[form], tools, is_opened=False,
                                                 is_required=tools.mode == "required")).accepts(text)


@pytest.mark.parametrize("form", FORMATS)
def test_grammar_of_each_format_holds_calls_to_their_schema(form: str) -> None:
    two = written(form, [*GOOD, ("clock", {})])
    for choice in ("required", "auto"):
        assert accepts(form, written(form, GOOD), choice) and accepts(form, written(form, [("clock", {})]), choice)
        assert not any(accepts(form, written(form, [call]), choice) for call in BAD)
        assert not accepts(form, written(form, GOOD)[:-1], choice)
        assert accepts(form, two, choice) == (form != "llama") and not accepts(form, two, choice, parallel=False)
    assert accepts(form, written(form, GOOD), NAMED)
    assert not accepts(form, written(form, [("clock", {})]), NAMED) and not accepts(form, two, NAMED)
    for text in ("", "plain \u00fc\n{", '{"nam', "<tool_cal", "[TOOL_CALL"):
        assert accepts(form, text, "auto") and not accepts(form, text, "required")
    before = written(form, GOOD, "Let me see: ") if FORMATS[form].mark else "Let me see: " + written(form, GOOD)
    assert accepts(form, before, "auto") and not accepts(form, before, "required")


def test_special_tokens_between_calls_leave_one_call_without_what_follows() -> None:
    form = without_special_tokens(FORMATS["hermes"], {"<tool_call>": 1, "</tool_call>": 2, "<s>": 3})
    assert form.between is None and form.after == "\n"
    assert without_special_tokens(FORMATS["hermes"], {"<s>": 3}) == FORMATS["hermes"]


# -- answers

@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A compilation cache for this module, so that further LLMs of the same sizes start fast."""
    before = jax.config.jax_persistent_cache_min_compile_time_secs, jax.config.jax_compilation_cache_dir
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield tmp_path_factory.mktemp("compiled")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[0])
    jax.config.update("jax_compilation_cache_dir", before[1])


def toy_llm(folder: Path, compiled: Path, **tokenizer: Any) -> LLM:
    make_checkpoint(folder, **MODEL)
    make_chat_tokenizer(**tokenizer).save(folder)
    return LLM(folder, compile_cache_dir=compiled, **SIZES)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Iterator[LLM]:
    """`<tool_call>` is token 259, an added one that is not special, as in Qwen2.5."""
    with toy_llm(tmp_path_factory.mktemp("hermes"), compiled, added=["<tool_call>", "</tool_call>"],
                 chat_template=HERMES) as llm:
        yield llm
        assert_idle(llm.engine)


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Iterator[LLM]:
    """`[TOOL_CALLS]` is the special token 259."""
    with toy_llm(tmp_path_factory.mktemp("mistral"), compiled, special=["<s>", "<|im_start|>", "<|im_end|>",
                                                                        "[TOOL_CALLS]"],
                 chat_template=MISTRAL) as llm:
        yield llm
        assert_idle(llm.engine)


OPENER = 259


def opens(llm: LLM) -> dict[int, float]:
    """Bias under which the model opens a call at once, and writes the marks as tokens instead of their characters."""
    added = llm.tokenizer.fast.get_added_vocab()
    biases = {"<tool_call>": 100.0, "[TOOL_CALLS]": 100.0, "</tool_call>": 50.0}
    return {added[mark]: bias for mark, bias in biases.items() if mark in added}


def hot(max_tokens: int = 400, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, **{"seed": 1, **fields})


def check_calls(output: RequestOutput, names: set[str]) -> None:
    assert output.error is None
    for completion in output.outputs:
        assert completion.finish_reason == "tool_calls" and completion.valid and completion.error is None
        assert completion.tool_calls and len({call.id for call in completion.tool_calls}) == len(completion.tool_calls)
        for call in completion.tool_calls:
            assert call.name in names and len(call.id) == 9 and call.id.isalnum()
            if call.name == "get_weather":
                jsonschema.validate(call.arguments, WEATHER["function"]["parameters"])
            else:
                assert call.arguments == {}


@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_required_and_named_choices_make_calls_of_a_random_model(family: str, request: pytest.FixtureRequest) -> None:
    llm = request.getfixturevalue(family)
    several = llm.chat([ASKED, [{"role": "user", "content": "Time?"}]], hot(n=3), tools=TOOLS, tool_choice="required",
                       parallel_tool_calls=False)
    for output in several:
        check_calls(output, {"get_weather", "clock"})
        assert all(len(completion.tool_calls) == 1 and completion.text == "" for completion in output.outputs)
    named, = llm.chat(ASKED, hot(n=4), tools=TOOLS, tool_choice=NAMED)
    check_calls(named, {"get_weather"})
    again, = llm.chat(ASKED, hot(n=4), tools=TOOLS, tool_choice=NAMED)
    assert [c.tool_calls for c in again.outputs] == [c.tool_calls for c in named.outputs], "the ids are the same, too"


@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_auto_choice_gives_text_or_whole_calls(family: str, request: pytest.FixtureRequest) -> None:
    llm = request.getfixturevalue(family)
    text, = llm.chat(ASKED, hot(12), tools=TOOLS)
    assert not text.outputs[0].tool_calls and text.outputs[0].finish_reason in ("stop", "length")
    assert text.outputs[0].error is None, "text that is cut off is no broken call"
    called, = llm.chat(ASKED, hot(n=3, logit_bias=opens(llm)), tools=TOOLS, parallel_tool_calls=False)
    check_calls(called, {"get_weather", "clock"})
    assert all(completion.token_ids[0] == OPENER and completion.text == "" for completion in called.outputs)


def test_auto_choice_with_a_special_opener_keeps_text_logprobs_and_limit(mistral: LLM) -> None:
    """Three tokens of text, then the opener: the second part goes on in the first one's KV."""
    params = hot(n=2, min_tokens=3, logit_bias={OPENER: 100.0, ord("a"): 60.0}, logprobs=0)
    output, = mistral.chat(ASKED, params, tools=TOOLS, parallel_tool_calls=False)
    check_calls(output, {"get_weather", "clock"})
    for completion in output.outputs:
        assert completion.text == "aaa" and completion.token_ids[:4] == [97, 97, 97, OPENER]
        assert len(completion.logprobs) == len(completion.token_ids)
        assert completion.cumulative_logprob == pytest.approx(sum(
            entry[token].logprob for entry, token in zip(completion.logprobs, completion.token_ids)))
    cut, = mistral.chat(ASKED, hot(10, min_tokens=3, logit_bias=params.logit_bias), tools=TOOLS)
    assert len(cut.outputs[0].token_ids) == 10 and cut.outputs[0].text.startswith("aaa[TOOL_CALLS] [{")
    at_the_mark, = mistral.chat(ASKED, hot(4, min_tokens=3, logit_bias=params.logit_bias), tools=TOOLS)
    for completion in (cut.outputs[0], at_the_mark.outputs[0]):
        assert completion.finish_reason == "length" and not completion.tool_calls
        assert completion.error.startswith("no tool call was taken: cut off")


@pytest.mark.parametrize("family", ["hermes", "mistral"])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_output_cut_off_inside_a_call_has_no_calls(family: str, choice: str, request: pytest.FixtureRequest) -> None:
    llm = request.getfixturevalue(family)
    output, = llm.chat(ASKED, hot(20, logit_bias=opens(llm)), tools=TOOLS, tool_choice=choice)
    completion = output.outputs[0]
    assert completion.finish_reason == "length" and completion.tool_calls == [] and '{"name": "' in completion.text
    assert completion.error.startswith("no tool call was taken: cut off by max_tokens=")


def test_choice_none_is_free_text_over_the_same_prompt(hermes: LLM) -> None:
    none, = hermes.chat(ASKED, hot(5), tools=TOOLS, tool_choice="none")
    auto, = hermes.chat(ASKED, hot(5), tools=TOOLS)
    assert none.prompt_token_ids == auto.prompt_token_ids
    assert none.outputs[0].grammar is None and none.outputs[0].tool_calls == []


def test_special_tokens_kept_in_the_text_do_not_disturb_calls(hermes: LLM) -> None:
    output, = hermes.chat(ASKED, hot(skip_special_tokens=False), tools=TOOLS, tool_choice=NAMED)
    check_calls(output, {"get_weather"})


@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_next_turn_finds_the_whole_previous_one_in_the_cache(family: str, request: pytest.FixtureRequest) -> None:
    llm = request.getfixturevalue(family)
    llm.cache.clear()
    first, = llm.chat(ASKED, hot(logit_bias=opens(llm)), tools=TOOLS, parallel_tool_calls=False)
    check_calls(first, {"get_weather", "clock"})
    answer = first.outputs[0]
    so_far = [*first.prompt_token_ids, *answer.token_ids]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in answer.tool_calls]
    second, = llm.chat([*ASKED, answer.as_message(), *results], hot(4), tools=TOOLS)
    assert second.error is None and second.prompt_token_ids[:len(so_far)] == so_far
    assert second.num_cached_tokens >= len(so_far) - 1


def test_python_functions_serve_as_tools(hermes: LLM) -> None:
    def clock(zone: Literal["UTC", "CET"]) -> str:
        """The time."""
    output, = hermes.chat(ASKED, hot(), tools=[clock, WEATHER], tool_choice={
        "type": "function", "function": {"name": "clock"}})
    assert output.outputs[0].tool_calls[0].arguments["zone"] in ("UTC", "CET")


def test_iterated_requests_mix_tools_and_plain_prompts(mistral: LLM) -> None:
    tools = read_tools(TOOLS, None, False)
    requests = [mistral.chat_request(ASKED, hot(logit_bias=opens(mistral), seed=i), tools=tools) if i % 2
                else ("x", hot(3)) for i in range(6)]
    found = dict(mistral.generate_iter(iter(requests), max_inflight=2))
    assert sorted(found) == list(range(6))
    for i, output in found.items():
        assert bool(output.outputs[0].tool_calls) == bool(i % 2)


def test_closed_iterator_leaves_no_opened_call_behind(mistral: LLM) -> None:
    tools = read_tools(TOOLS, None, False)
    many = mistral.generate_iter(iter([mistral.chat_request(ASKED, hot(logit_bias=opens(mistral), seed=i), tools=tools)
                                       for i in range(8)]), max_inflight=2)
    next(many)
    many.close()
    assert mistral.num_unfinished == 0


# -- errors

def test_template_that_shows_no_tools_is_refused_unless_a_format_is_named(tmp_path: Path, compiled: Path) -> None:
    with toy_llm(tmp_path, compiled) as llm:
        with pytest.raises(RequestError, match=r"does not show tools.*LLM\(chat_template=\.\.\.\).*tool_format="):
            llm.chat(ASKED, tools=TOOLS)
        for form in ("json", "llama", "hermes", "mistral"):
            output, = llm.chat(ASKED, hot(), tools=TOOLS, tool_choice=NAMED, tool_format=form)
            check_calls(output, {"get_weather"})
        assert llm.chat(ASKED, hot(3), tools=TOOLS, tool_choice="none")[0].error is None
        with pytest.raises(RequestError, match="tool_format='xml': expected one of hermes"):
            llm.chat(ASKED, tools=TOOLS, tool_format="xml")


def test_tools_that_cannot_be_used_are_one_error_before_any_work(hermes: LLM) -> None:
    steps = hermes.stats()["steps"]
    odd = {"type": "object", "properties": {"x": {"not": {"type": "string"}}}}
    with pytest.raises(RequestError, match="tool 'f': parameters cannot be enforced: .*not"):
        hermes.chat(ASKED, tools=[{"type": "function", "function": {"name": "f", "parameters": odd}}])
    with pytest.raises(RequestError, match="tool 'f': parameters are not JSON"):
        hermes.chat(ASKED, tools=[{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"x": {"const": float("nan")}}}}}])
    for fields, words in ((dict(tool_choice="auto"), "without tools"), (dict(tool_format="json"), "without tools"),
                          (dict(tools=TOOLS, tool_choice="always"), "tool_choice='always'")):
        with pytest.raises(RequestError, match=words):
            hermes.chat(ASKED, **fields)
    assert hermes.stats()["steps"] == steps


def test_conversation_that_cannot_have_tools_is_a_record_in_its_place(hermes: LLM) -> None:
    broken = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{"}}]}]
    outputs = hermes.chat([ASKED, broken, ASKED, ASKED], [hot(3), hot(3), hot(3, regex="a"), hot(3, ignore_eos=True)],
                          tools=TOOLS)
    assert outputs[0].error is None and "messages[1].tool_calls[0]" in outputs[1].error
    assert "tools with regex" in outputs[2].error and "ignore_eos" in outputs[3].error
    with pytest.raises(RequestError, match="other 'tools'"):
        hermes.chat(ASKED, tools=TOOLS, template_kwargs={"tools": []}, on_error="raise")


# -- batch files

def test_batch_lines_with_tools_are_answered_in_openai_s_form(hermes: LLM, tmp_path: Path) -> None:
    def line(name: str, **body: Any) -> str:
        return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {
            "messages": ASKED, "max_tokens": 300, "seed": 3, **body}})

    history = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "abc", "type": "function", "function": {"name": "clock", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "abc", "content": "12:00"}]
    (tmp_path / "in").write_text("\n".join([
        line("named", tools=TOOLS, tool_choice=NAMED), line("text", tools=TOOLS, tool_choice="none", max_tokens=3),
        line("unknown", tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x"}}),
        line("next", tools=TOOLS, messages=history, max_tokens=3)]))
    with (tmp_path / "answers").open("w") as answers:
        summary = run_batch(tmp_path / "in", tmp_path / "out", lambda: contextlib.nullcontext(hermes),
                            show_progress=False, answers_to=answers)
    named, text, unknown, following = map(json.loads, (tmp_path / "out").read_text().splitlines())
    choice, = named["response"]["body"]["choices"]
    message, = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    assert message["type"] == "function" and message["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(message["function"]["arguments"]), WEATHER["function"]["parameters"])
    assert set(text["response"]["body"]["choices"][0]["message"]) == {"role", "content"}
    assert unknown["error"]["code"] == "invalid_request" and "'x'" in unknown["error"]["message"]
    assert following["error"] is None
    assert summary.answered == 3 and summary.finish_reasons["tool_calls"] == 1
    assert "named: get_weather({" in (tmp_path / "answers").read_text()


# -- a real model

@pytest.mark.slow
@pytest.mark.skipif(not smollm.is_installed(), reason="the demo model is not installed")
def test_smollm2_calls_a_tool_under_a_template_that_shows_it() -> None:
    """Its own template shows no tools, which is said."""
    messages = [{"role": "user", "content": "What will the weather be in Rome in 3 days?"}]
    with LLM("demo", chat_template=HERMES, dtype="float32", max_num_seqs=1, prefill_chunk_tokens=32, max_model_len=512,
             kv_cache_bytes=2**26, shared_attention=False, quiet=True) as llm:
        output, = llm.chat(messages, SamplingParams(temperature=0, max_tokens=60), tools=TOOLS, tool_choice=NAMED)
        check_calls(output, {"get_weather"})
    with pytest.raises(RequestError, match="does not show tools"):
        check_shows_tools(load_tokenizer("demo"), read_tools(TOOLS))
