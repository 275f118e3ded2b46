"""Search helpers on a tiny model: what they return, how they share, and that they find what can be found."""
from __future__ import annotations

import math
from xml.etree import ElementTree

import numpy as np
import pytest

import jradix
from jradix import LLM, SamplingParams, gen
from jradix.errors import ProgramError
from jradix.search import SearchNode, beam, best_of_n, mcts, self_consistency
from toy_engine import ToyLM

WARM = SamplingParams(max_tokens=4, temperature=1.0, ignore_eos=True)
PROMPT = "a long common prompt that every branch of the search has. "


def step(s: jradix.State) -> None:
    s += gen("move", seed=None)


def begin(llm: LLM) -> jradix.State:
    s = jradix.start(llm, WARM)
    s += PROMPT
    return s


def vowels(s: jradix.State) -> float:
    moved = s.text().removeprefix(PROMPT)
    return sum(ord(char) % 2 for char in moved) / max(len(moved), 1)


def test_best_of_n_returns_the_way_with_the_highest_score_and_shares_the_prompt(llm: LLM) -> None:
    s = begin(llm)
    before = llm.stats()["tokens"]["computed_prompt"]
    found = best_of_n(s, 6, step, vowels)
    scores = [node.score for node in found.tree.children]
    assert len(scores) == 6 and found.score == max(scores) == vowels(found.best)
    assert [node.is_chosen for node in found.tree.children].count(True) == 1
    assert llm.stats()["tokens"]["computed_prompt"] - before == len(PROMPT) + extra(6)


def extra(num_branches: int) -> int:
    """Every branch but the first computes the prompt's last token, whose logits it draws from."""
    return num_branches - 1


def test_best_of_n_score_that_generates_judges_all_at_once(llm: LLM) -> None:
    s = begin(llm)

    def judge(fork: jradix.State) -> float:
        asked = fork.copy()
        asked += " good? "
        asked += gen("verdict", dtype=bool, max_tokens=20)
        return float(asked["verdict"])

    before = llm.stats()["steps"]
    found = best_of_n(s, 8, step, judge)
    assert found.score in (0.0, 1.0)
    assert llm.stats()["steps"] - before < 40        # about 4 + 20, not 8 times that


def test_self_consistency_counts_votes_and_takes_the_earliest_of_equals(llm: LLM) -> None:
    s = begin(llm)
    ways = iter(["b", None, "a", "b", "a"])
    written: dict[int, str | None] = {}

    def note(fork: jradix.State) -> None:
        step(fork)
        written[id(fork)] = next(ways)

    found = self_consistency(s, 5, note, lambda fork: written[id(fork)])
    assert found.answer == "b" and found.score == 2 / 5
    assert [node.score for node in found.tree.children] == [0.4, None, 0.4, 0.4, 0.4]
    with pytest.raises(ValueError, match="none of 2 ways has an answer"):
        self_consistency(s, 2, step, lambda fork: None)


@pytest.mark.parametrize("width", [1, 3])
def test_beam_is_a_beam_search_over_the_whole_vocabulary(llm: LLM, ref: ToyLM, width: int) -> None:
    """Against one in float64 that looks at every token."""
    s = jradix.start(llm)
    s += "once"
    found = beam(s, width=width, max_tokens=5)
    prompt = llm.encode("once")

    def next_logprobs(tokens: list[int]) -> list[float]:
        logits = ref.logits(tokens)[-1][:llm.tokenizer.vocab_size]
        return (logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())).tolist()

    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int]]] = []
    for _ in range(5):
        grown = [(logprob + more, [*tokens, i]) for logprob, tokens in beams
                 for i, more in enumerate(next_logprobs([*prompt, *tokens]))]
        grown.sort(key=lambda each: -each[0])
        ended += [(lp / len(t), t) for lp, t in grown[:2 * width] if t[-1] in llm.end_token_ids]
        beams = [each for each in grown[:2 * width] if each[1][-1] not in llm.end_token_ids][:width]
    score, tokens = max([*ended, *((lp / len(t), t) for lp, t in beams)])
    assert found.score == pytest.approx(score, abs=1e-4)
    assert found.best.token_ids() == [*prompt, *(i for i in tokens if i not in llm.end_token_ids)]


def test_beam_beats_greedy_where_greedy_is_not_best(llm: LLM) -> None:
    s = jradix.start(llm)
    s += "once"
    narrow, wide = beam(s, width=1, max_tokens=6), beam(s, width=8, max_tokens=6)
    assert wide.score >= narrow.score
    greedy = llm.generate("once", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0].outputs[0]
    if not set(greedy.token_ids) & llm.end_token_ids:
        assert narrow.best.token_ids()[-6:] == greedy.token_ids


def test_mcts_visits_add_up_and_the_best_rollout_is_returned(llm: LLM) -> None:
    s = begin(llm)
    seen: list[float] = []

    def reward(state: jradix.State) -> float:
        seen.append(vowels(state))
        return seen[-1]

    found = mcts(s, step=step, reward=reward, num_rollouts=24, width=3, max_depth=3, batch=6)
    assert len(seen) == 24 and found.score == max(seen) and vowels(found.best) == found.score
    assert found.tree.visits == 24
    for node in found.tree.walk():
        assert node.depth <= 3
        if node.children:
            assert len(node.children) == 3
            assert sum(child.visits for child in node.children) <= node.visits
        if node.visits:
            assert node.score is not None and 0 <= node.score <= 1
    assert found.tree.is_chosen
    assert llm.stats()["cache"]["pins"] == 0


def test_mcts_with_a_known_best_move_concentrates_on_it(llm: LLM) -> None:
    """Rewards by the first move: UCT goes where they are highest."""
    s = jradix.start(llm, SamplingParams(max_tokens=1, temperature=2.0, ignore_eos=True))
    s += "x"
    first: dict[int, int] = {}

    def reward(state: jradix.State) -> float:
        token = state.token_ids()[1]
        return 1.0 if token == min(first.setdefault(0, token), token) and token == first[0] else 0.0

    found = mcts(s, step=step, reward=reward, num_rollouts=60, width=4, max_depth=2, batch=4)
    best = max(found.tree.children, key=lambda node: node.score)
    assert best.visits == max(node.visits for node in found.tree.children) > 60 / 4


def test_mcts_inside_a_program_shares_steps_with_other_programs(llm: LLM) -> None:
    @jradix.function
    def search(s, i):
        s += f"{i}: " + PROMPT
        return mcts(s, step=step, reward=vowels, num_rollouts=6, width=2, max_depth=2, batch=3).score

    states = search.run_batch(range(4), llm=llm, params=WARM)
    assert all(s.error is None and 0 <= s.result <= 1 for s in states)


def test_search_step_that_fails_raises_after_the_others_have_ended(llm: LLM) -> None:
    def bad(s: jradix.State) -> None:
        s += "x" * 600
        s += gen("y")

    with pytest.raises(ProgramError, match="prompt of 658 tokens"):
        best_of_n(begin(llm), 3, bad, vowels)
    assert llm.num_unfinished == 0


def test_search_arguments_out_of_range_are_named(llm: LLM) -> None:
    s = begin(llm)
    with pytest.raises(ValueError, match="width=11"):
        beam(s, width=11)
    with pytest.raises(ValueError, match="num_rollouts=0"):
        mcts(s, step=step, reward=vowels, num_rollouts=0)


def test_tree_pictures_show_every_node_and_mark_the_way(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = mcts(begin(llm), step=step, reward=vowels, num_rollouts=12, width=3, max_depth=2, batch=4)
    nodes = list(found.tree.walk())
    text, svg = str(found.tree), found.tree.svg()
    assert len(text.splitlines()) == len(nodes) and text.startswith("* ")
    shapes = ElementTree.fromstring(svg)
    texts = shapes.findall("{http://www.w3.org/2000/svg}text")
    assert len(texts) == len(nodes)
    assert len({(t.get("x"), t.get("y")) for t in texts}) == len(nodes)
    (tmp_path_factory.getbasetemp() / "search_tree.svg").write_text(svg, encoding="utf-8")


def test_tree_label_is_one_line_and_short(llm: LLM) -> None:
    node = SearchNode("a\n" * 80, begin(llm), math.pi, visits=3)
    assert node.label(20).startswith("3.14 ×3 a a a") and len(node.label(20)) == 20 + len("3.14 ×3 ")
    assert np.isfinite(node.score)


def test_mcts_equal_moves_pin_their_common_text_once_and_give_it_back(llm: LLM) -> None:
    """Greedy moves: all children of a node have the same text."""
    s = jradix.start(llm, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    s += PROMPT
    found = mcts(s, step=step, reward=vowels, num_rollouts=12, width=2, max_depth=3, batch=4)
    assert found.tree.visits == 12 and llm.stats()["cache"]["pins"] == 0


def test_map_that_is_interrupted_leaves_nothing_of_its_tasks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    s = begin(llm)
    s.text()
    step_engine, calls = llm.engine.step, iter(range(100))

    def interrupted() -> object:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return step_engine()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        best_of_n(s, 3, step, vowels)
    monkeypatch.undo()
    assert llm.num_unfinished == 0
    assert best_of_n(begin(llm), 2, step, vowels).score >= 0
