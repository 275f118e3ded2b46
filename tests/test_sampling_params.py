"""SamplingParams: every range is checked where it is made, and defaults are merged field by field."""
from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from jradix.sampling_params import MAX_LOGPROBS, SamplingParams

NAN, INF = float("nan"), float("inf")

REFUSED: list[tuple[str, Any]] = [
    ("n", 0), ("n", 1.5), ("n", None), ("n", True),
    ("max_tokens", -1), ("max_tokens", 2.0),
    ("min_tokens", -1), ("min_tokens", None),
    ("temperature", -0.1), ("temperature", NAN), ("temperature", INF), ("temperature", "1"),
    ("top_p", 0), ("top_p", 1.01), ("top_p", NAN), ("top_p", -0.5),
    ("top_k", -2), ("top_k", 1.5),
    ("min_p", -0.1), ("min_p", 1.1), ("min_p", NAN),
    ("seed", "7"), ("seed", 1.0), ("seed", -2**63 - 1),
    ("stop", ""), ("stop", ["", "END"]), ("stop", [3]),
    ("stop_token_ids", [-1]), ("stop_token_ids", [1.5]), ("stop_token_ids", ["a"]),
    ("include_stop_str_in_output", 1), ("ignore_eos", "yes"), ("skip_special_tokens", None),
    ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("presence_penalty", NAN),
    ("frequency_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", None),
    ("repetition_penalty", 0), ("repetition_penalty", -1.0), ("repetition_penalty", INF),
    ("logit_bias", {-1: 1.0}), ("logit_bias", {1: NAN}), ("logit_bias", [1, 2]), ("logit_bias", {"x": 1.0}),
    ("logprobs", -1), ("logprobs", MAX_LOGPROBS + 1), ("logprobs", True),
    ("prompt_logprobs", -1), ("prompt_logprobs", MAX_LOGPROBS + 1),
    ("json_schema", 3), ("json_schema", [1]), ("regex", b"a"), ("regex", 1), ("choices", "ab"), ("choices", 3),
    ("max_tokens", "many"), ("max_tokens", "enough"), ("grammar", 3), ("structural_tag", "tag"),
    ("grammar_options", {"strict": True}), ("grammar_options", "strict"),
    ("cache", 0), ("cache", None), ("cache_namespace", ""), ("cache_namespace", 3), ("cache_namespace", ()),
    ("cache_namespace", [1.5]), ("cache_namespace", {"a": 1}), ("cache_namespace", ("a", None)),
]


@pytest.mark.parametrize("name, value", REFUSED, ids=lambda value: repr(value))
def test_params_value_outside_its_range_error_names_the_field(name: str, value: Any) -> None:
    """P04: negative and NaN temperatures are refused, and so is every other value that cannot be served."""
    with pytest.raises(ValueError, match=rf"^{name}="):
        SamplingParams(**{name: value})


def test_params_every_field_has_a_refused_value() -> None:
    assert {name for name, _ in REFUSED} == {field.name for field in dataclasses.fields(SamplingParams)}


def test_params_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens=5 is more than max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize("fields", [
    dict(max_tokens=0), dict(temperature=0), dict(temperature=1e-38), dict(top_p=1), dict(top_k=-1), dict(top_k=0),
    dict(top_k=10**6), dict(min_p=0), dict(min_p=1), dict(seed=-1), dict(presence_penalty=-2),
    dict(frequency_penalty=2), dict(logprobs=0), dict(logprobs=MAX_LOGPROBS), dict(logit_bias={5: -INF}),
    dict(repetition_penalty=1e-3)])
def test_params_value_at_its_limit_is_accepted(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields


def test_params_texts_and_ids_become_tuples() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert SamplingParams().stop == SamplingParams().stop_token_ids == ()


def test_params_logit_bias_from_json_has_integer_keys() -> None:
    assert SamplingParams(logit_bias={"12": 1}).logit_bias == {12: 1.0}


def test_from_dict_unknown_name_lists_the_known_ones() -> None:
    """P07: a field that is not known is an error, never ignored."""
    with pytest.raises(ValueError) as caught:
        SamplingParams.from_dict({"temperature": 1.0, "temprature": 0.5})
    message = str(caught.value)
    assert "'temprature'" in message
    assert all(field.name in message for field in dataclasses.fields(SamplingParams))


def test_from_dict_known_names_equal_the_constructor() -> None:
    values = dict(temperature=0.5, top_k=3, stop=["x"], seed=4)
    assert SamplingParams.from_dict(values) == SamplingParams(**values)


GENERATION_CONFIG = dict(temperature=0.1, top_k=1, repetition_penalty=1.05)


@pytest.mark.parametrize("given, temperature", [({}, 0.1), (dict(max_tokens=4), 0.1), (dict(temperature=1.0), 1.0)])
def test_resolved_fields_are_merged_one_by_one(given: dict[str, Any], temperature: float) -> None:
    """P09: giving one field leaves the others at the model's defaults."""
    params = SamplingParams(**given).resolved(GENERATION_CONFIG)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (temperature, 1, 1.05)
    assert (params.top_p, params.min_p) == (1.0, 0.0)
    assert params.max_tokens == given.get("max_tokens")


def test_resolved_empty_config_gives_neutral_values() -> None:
    """P09: without a generation config nothing is changed behind the user's back."""
    params = SamplingParams().resolved({})
    assert (params.temperature, params.top_p, params.top_k, params.min_p, params.repetition_penalty) == (1, 1, 0, 0, 1)


def test_resolved_zero_is_a_value_and_not_a_gap() -> None:
    """P09: a zero given by the user is kept."""
    params = SamplingParams(temperature=0, top_k=0, min_p=0).resolved(dict(temperature=0.7, top_k=20, min_p=0.1))
    assert (params.temperature, params.top_k, params.min_p) == (0, 0, 0)


def test_resolved_none_in_config_counts_as_absent() -> None:
    assert SamplingParams().resolved(dict(temperature=None, top_k=None)).temperature == 1.0


@pytest.mark.parametrize("config, temperature", [
    (dict(do_sample=False), 0.0), (dict(do_sample=False, temperature=0.6), 0.6), (dict(do_sample=True), 1.0)])
def test_resolved_do_sample_false_is_greedy_unless_a_temperature_is_given(config: dict[str, Any],
                                                                         temperature: float) -> None:
    assert SamplingParams().resolved(config).temperature == temperature


def test_resolved_twice_changes_nothing_more() -> None:
    once = SamplingParams(top_p=0.9).resolved(GENERATION_CONFIG)
    assert once.resolved(dict(temperature=2.0, top_k=9)) == once


def test_resolved_config_value_outside_its_range_names_the_field() -> None:
    with pytest.raises(ValueError, match="^top_p="):
        SamplingParams().resolved(dict(top_p=1.5))


@pytest.mark.parametrize("fields, greedy", [
    (dict(temperature=0), True), (dict(temperature=1.0, top_k=1), True), (dict(temperature=1.0), False),
    (dict(temperature=1e-8), False), (dict(temperature=1.0, top_k=-1), False)])
def test_is_greedy_temperature_zero_or_top_k_one(fields: dict[str, Any], greedy: bool) -> None:
    """P06: only temperature 0 and top_k 1 are greedy."""
    assert SamplingParams(**fields).is_greedy is greedy


def test_params_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2
