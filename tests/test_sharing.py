"""Rows that read a shared prefix together: which groups the scheduler forms, and that no token depends on it."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from jradix.batch import StepLayout
from jradix.cache.prefix_cache import PrefixCache
from jradix.config import SHARED_MEMBERS, SharingCost, StepShape
from jradix.sched.plan import Row, SharedRows, StepPlan, build_step_batch
from jradix.sched.sharing import shared_rows
from test_step_batch import VOCAB_SIZE, make_request
from toy_engine import FREE_SHARING, greedy, make_engine, random_prompts, run_all, toy_runner, tokens_of

PAGE = 4


def rows_on(prompts: Sequence[Sequence[int]], cached: Sequence[int]) -> list[Row]:
    """Decode rows behind these tokens, of which the first `cached` are in the tree."""
    cache = PrefixCache.create(page_size=PAGE, num_pages=200, max_pages=50)
    rows = []
    for slot, (prompt, num_cached) in enumerate(zip(prompts, cached)):
        tokens = np.array(prompt, np.int32)
        lease = cache.acquire(tokens)
        cache.extend(lease, len(tokens))
        cache.commit(lease, tokens[:num_cached])
        rows.append(Row(SimpleNamespace(lease=lease, tokens=tokens), len(prompt) - 1, 1, slot, 1, False, 0))
    return rows


def groups_of(rows: list[Row], cost: SharingCost = FREE_SHARING) -> list[tuple[int, list[int]]]:
    plan = StepPlan(rows, len(rows))
    found = shared_rows(plan, cost, PAGE)
    taken = [i for group in found for i in group.rows]
    assert len(taken) == len(set(taken)), "a row is in two groups"
    for group in found:
        tables = np.stack([rows[i].request.lease.page_table[0, :group.num_pages] for i in group.rows])
        assert (tables == tables[0]).all() and (tables > 0).all(), "the rows do not hold the same pages"
    return sorted((group.num_pages, sorted(group.rows)) for group in found)


def test_groups_rows_with_one_prefix_form_one_group() -> None:
    prefix = list(range(20))
    rows = rows_on([prefix + [100 + i] * 6 for i in range(4)], [26] * 4)
    assert groups_of(rows) == [(5, [0, 1, 2, 3])]


def test_groups_of_rows_that_share_nothing_are_none() -> None:
    assert groups_of(rows_on([[10 * i + j for j in range(12)] for i in range(3)], [12] * 3)) == []
    assert groups_of([]) == []


def test_groups_deeper_ancestor_is_taken_where_it_saves_more() -> None:
    """Two pairs with 40 tokens of their own below 4 common ones: two deep groups save 80, one of all four 12."""
    top, left, right = [1] * 4, [2] * 40, [3] * 40
    prompts = [top + left + [5] * 5, top + left + [6] * 5, top + right + [7] * 5, top + right + [8] * 5]
    assert groups_of(rows_on(prompts, [48] * 4)) == [(11, [0, 1]), (11, [2, 3])]


def test_groups_common_ancestor_is_taken_where_it_saves_more() -> None:
    top = [1] * 40
    prompts = [top + [2] * 4 + [5] * 5, top + [2] * 4 + [6] * 5, top + [3] * 4 + [7] * 5, top + [4] * 8]
    assert groups_of(rows_on(prompts, [48] * 4)) == [(10, [0, 1, 2, 3])]


def test_groups_that_do_not_pay_are_not_formed() -> None:
    rows = rows_on([[1] * 20 + [100 + i] * 6 for i in range(4)], [26] * 4)
    assert groups_of(rows, SharingCost(read=1.0, member=0.5, part=21.0)) == []       # saves 20 tokens, costs 21
    assert groups_of(rows, SharingCost(read=1.0, member=0.5, part=19.0)) == [(5, [0, 1, 2, 3])]


def test_groups_end_before_a_row_s_first_new_token() -> None:
    rows = rows_on([[1] * 20 + [100 + i] * 6 for i in range(2)], [26] * 2)
    rows[1].start = 9
    assert groups_of(rows) == [(2, [0, 1])]


def test_groups_leave_out_chunks_unless_the_step_is_short() -> None:
    rows = rows_on([[1] * 20 + [100 + i] * 6 for i in range(3)], [26] * 3)
    rows[2].num_tokens = 2
    assert [group.rows for group in shared_rows(StepPlan(rows, 2), FREE_SHARING, PAGE)] == [[0, 1, 2]]
    rows[2].num_tokens = 17
    assert [group.rows for group in shared_rows(StepPlan(rows, 2), FREE_SHARING, PAGE)] == [[0, 1]]


def layout_of(shape: StepShape) -> StepLayout:
    return StepLayout(shape, num_groups=1, max_pages=6, page_size=PAGE, num_logit_rows=32, vocab_size=VOCAB_SIZE)


def test_step_batch_groups_are_cut_into_parts_and_padded() -> None:
    size = SHARED_MEMBERS
    requests = [make_request(range(9)) for _ in range(size + 3)]
    rows = [Row(r, 8, 1, i, 1, False, 0) for i, r in enumerate(requests)]
    plan = StepPlan(rows, len(rows), shared=[SharedRows(2, list(range(size + 1))), SharedRows(1, [size + 1, size + 2])])
    shape = StepShape(2 * size, 0)
    batch = layout_of(shape).step_batch(build_step_batch(plan, layout_of(shape), spare_slot=99)[0].ints)
    none = shape.num_tokens
    assert batch.shared_lens.tolist() == [8, 4, *[0] * (size - 2)]    # the group's last row reads its prefix by itself
    assert batch.shared_members[:2].tolist() == [list(range(size)), [size + 1, size + 2, *[none] * (size - 2)]]
    assert (batch.shared_members[2:] == none).all()


def test_step_batch_in_short_steps_each_token_is_a_query() -> None:
    requests = [make_request(range(12)) for _ in range(2)]
    plan = StepPlan([Row(requests[0], 11, 1, 0, 1, False, 0), Row(requests[1], 9, 3, 1, 1, False, 0)], 1,
                    shared=[SharedRows(2, [0, 1])])
    for shape, members in ((StepShape(2, 6, is_short=True), [0, 1, 2, 3]), (StepShape(4, 16), [])):
        batch = layout_of(shape).step_batch(build_step_batch(plan, layout_of(shape), spare_slot=20)[0].ints)
        found = batch.shared_members[batch.shared_lens > 0].ravel()
        assert found[found < shape.num_tokens].tolist() == members    # a chunk is no member


@pytest.mark.parametrize("how", [{}, dict(overlap=False), dict(decode_steps=4), dict(num_pages=24, reserve_tokens=0),
                                 dict(prefill_chunk_tokens=7)], ids=str)
def test_tokens_with_and_without_shared_attention_are_equal(how: dict[str, int]) -> None:
    """A tree of prompts: one trunk of all, branches of several, leaves; NaN in every slot that nobody owns."""
    trunk, *branches = (prompt[:21] for prompt in random_prompts(3, seed=5, shortest=21))
    prompts = [trunk + branch[:9] + [i + 3] for branch in branches for i in range(3)]
    runner = toy_runner(page_size=PAGE)
    saved, tokens = [], []
    for shared in (True, False):
        engine = make_engine(runner, shared_attention=shared, **how)
        tokens.append([tokens_of(run_all(engine, prompts, greedy(16), poison=np.nan)) for _ in range(2)])
        saved.append(engine.scheduler.counters.num_saved_kv_reads)
    assert tokens[0] == tokens[1]
    assert saved[0] > 0 and saved[1] == 0


def test_samples_of_one_prompt_read_it_together() -> None:
    engine = make_engine(toy_runner(page_size=PAGE))
    (prompt,) = random_prompts(1, seed=6, shortest=40)
    params = dataclasses.replace(greedy(9), n=4, temperature=1.0)
    run_all(engine, [prompt], params, poison=np.nan)
    assert engine.scheduler.counters.num_saved_kv_reads >= 3 * 36 * 8


def test_runner_without_room_for_groups_refuses_an_engine_that_forms_them() -> None:
    runner = toy_runner(page_size=PAGE, shared_attention=False)
    with pytest.raises(ValueError, match="shared_attention=True, but the runner was made without it"):
        make_engine(runner, shared_attention=True)
    engine = make_engine(runner)
    run_all(engine, random_prompts(2, seed=7), greedy(4), poison=np.nan)
    assert engine.scheduler.counters.num_saved_kv_reads == 0


def test_step_shape_short_without_room_for_a_second_token_is_refused() -> None:
    with pytest.raises(ValueError, match="more tokens than rows"):
        StepShape(16, 0, is_short=True)
