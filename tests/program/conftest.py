from __future__ import annotations

from collections.abc import Iterator

import pytest

from jradix import LLM
from toy_engine import ToyLM, assert_idle
from toy_llm import toy_llm


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, ToyLM]]:
    llm, ref = toy_llm(tmp_path_factory.mktemp("models") / "toy")
    with llm:
        yield llm, ref


@pytest.fixture
def ref(pair: tuple[LLM, ToyLM]) -> ToyLM:
    """The LLM's model in float64."""
    return pair[1]


@pytest.fixture
def llm(pair: tuple[LLM, ToyLM]) -> Iterator[LLM]:
    """The shared LLM with an empty cache; afterwards no request and no page may be left in use."""
    shared_llm = pair[0]
    shared_llm.cache.clear(unpin=True)
    yield shared_llm
    while shared_llm.engine._in_flight:
        shared_llm.engine.step()
    assert_idle(shared_llm.engine)
    assert not shared_llm._sinks
