"""The bridge: packed buffers and their views, what a plan becomes in them, and the list of compiled shapes."""
from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from jradix.batch import LOGIT_BLOCK, NUM_STOP_IDS, PackedBatch, StepBatch, StepLayout
from jradix.cache.pages import SCRATCH_PAGE
from jradix.cache.prefix_cache import Lease, PrefixCache
from jradix.config import (MAX_PROGRAMS, SHARED_MEMBERS, STATE_BYTES, EngineConfig, GrammarSizes, StepShape,
                           StepShapes)
from jradix.sampling_params import SamplingParams
from jradix.sched.plan import NO_TOKEN, Row, StepNeeds, StepPlan, build_step_batch
from jradix.sched.request import Request

SPARE_SLOT = 8
MAX_PAGES = 6
VOCAB_SIZE = 50


def make_layout(num_rows: int = 4, num_chunk_tokens: int = 16, num_groups: int = 1) -> StepLayout:
    return StepLayout(StepShape(num_rows, num_chunk_tokens), num_groups=num_groups, max_pages=MAX_PAGES,
                      page_size=4, num_logit_rows=LOGIT_BLOCK, vocab_size=VOCAB_SIZE)


def make_request(tokens: Sequence[int], num_prompt: int | None = None, *, page_size: int = 4, num_groups: int = 1,
                 seed: tuple[int, int] = (0, 0), eos_ids: frozenset[int] = frozenset(), **params: object) -> Request:
    """A running request whose tokens all have room."""
    params = {"temperature": 0, **params}
    request = Request(0, np.array(tokens, np.int32), len(tokens) if num_prompt is None else num_prompt,
                      SamplingParams(**params).resolved({}), 16, eos_ids, seed=seed)
    request.num_tokens = len(tokens)
    cache = PrefixCache.create(page_size=page_size, num_pages=16, max_pages=MAX_PAGES, num_groups=num_groups)
    request.lease = cache.acquire(request.known_tokens)
    cache.extend(request.lease, len(tokens))
    return request


def chunk(request: Request, start: int, num_tokens: int, slot: int, *, num_samples: int = 0,
          first_logit: int | None = None) -> Row:
    return Row(request, start, num_tokens, slot, num_samples, False, request.num_output, first_logit)


def decode(request: Request, slot: int, *, is_input_on_device: bool = False, num_samples: int = 1) -> Row:
    in_flight = int(is_input_on_device)
    return Row(request, request.num_tokens - 1 + in_flight, 1, slot, num_samples, is_input_on_device,
               request.num_output + in_flight)


def build(rows: list[Row], num_decode: int, layout: StepLayout | None = None, num_steps: int = 1
          ) -> tuple[StepBatch, PackedBatch, StepNeeds]:
    layout = layout or make_layout()
    packed, needs = build_step_batch(StepPlan(rows, num_decode, num_steps), layout, spare_slot=SPARE_SLOT)
    return layout.step_batch(packed.ints), packed, needs


# -- layout


@pytest.mark.parametrize("num_rows, num_chunk_tokens, num_groups", [(1, 0, 1), (4, 16, 1), (8, 32, 2), (3, 7, 3)])
def test_layout_views_cover_each_buffer_once(num_rows: int, num_chunk_tokens: int, num_groups: int) -> None:
    layout = make_layout(num_rows, num_chunk_tokens, num_groups)
    packed = layout.allocate()
    views = [*layout.step_batch(packed.ints), *layout.row_params(packed.row_ints, packed.row_floats)]
    for value, view in enumerate(views, 1):
        assert not view.size or any(np.shares_memory(view, buffer) for buffer in packed[:3])
        view += value
    for value, view in enumerate(views, 1):
        assert (view == value).all()
    for buffer in packed[:3]:
        assert (buffer != 0).all() and buffer.ndim == 1
    assert [buffer.dtype for buffer in packed] == [np.int32, np.int32, np.float32, np.int32, np.int32, np.uint32]


def test_layout_row_masks_are_there_only_where_asked_for() -> None:
    layout = make_layout(4)
    assert layout.allocate().row_masks.shape == (0, 2)
    masks = layout.allocate(with_masks=True).row_masks
    assert masks.shape == (4, 2) and not masks.any()


def test_layout_shapes_follow_the_step_shape() -> None:
    layout = make_layout(4, 16, 2)
    packed = layout.allocate()
    batch, params = layout.step_batch(packed.ints), layout.row_params(packed.row_ints, packed.row_floats)
    assert {name: view.shape for name, view in batch._asdict().items()} == dict(
        tokens=(20,), token_src=(4,), cu_q_lens=(5,), kv_lens=(4,), page_table=(2, 4, MAX_PAGES), row_slots=(4,),
        is_sampled=(4,), num_decode=(1,), shared_lens=(2,), shared_members=(2, SHARED_MEMBERS))
    assert params.stop_ids.shape == (4, NUM_STOP_IDS) and params.seeds.shape == (4, 2)
    assert {getattr(params, name).shape for name in params._fields if name not in ("stop_ids", "seeds")} == {(4,)}


def test_layout_row_params_depend_on_the_number_of_rows_only() -> None:
    """One sampler per row bucket serves all chunk buckets."""
    sizes = {tuple(len(buffer) for buffer in make_layout(4, num_chunk).allocate()[1:3]) for num_chunk in (0, 16, 512)}
    assert len(sizes) == 1


def test_layout_allocate_gives_fresh_buffers_each_time() -> None:
    """A step on CPU reads its buffers in place: the next step must not write them."""
    layout = make_layout()
    one, other = layout.allocate(), layout.allocate()
    assert not any(np.shares_memory(a, b) for a, b in itertools.product(one, other))


# -- a plan in arrays


def test_batch_padding_rows_touch_nothing() -> None:
    request = make_request([5, 6, 7, 8, 9])
    batch, _, needs = build([chunk(request, 0, 5, slot=2, num_samples=1)], 0)
    assert batch.cu_q_lens.tolist() == [0, 5, 5, 5, 5]
    assert batch.kv_lens.tolist() == [5, 0, 0, 0]
    assert batch.row_slots.tolist() == [2, SPARE_SLOT, SPARE_SLOT, SPARE_SLOT]
    assert batch.token_src.tolist() == [-1] * 4
    assert batch.is_sampled.tolist() == [1, 0, 0, 0]
    assert (batch.page_table[:, 1:] == SCRATCH_PAGE).all()
    assert batch.page_table[0, 0].tolist() == [1, 2, *[SCRATCH_PAGE] * 4]
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, *[0] * 15]
    assert needs == StepNeeds(False, 0)


def test_batch_decode_and_chunk_rows_lie_one_after_the_other() -> None:
    known, ahead = make_request([1, 2, 3, 4, 5], 3), make_request([6, 7, 8, 9], 4)
    first, middle = make_request([10, 11, 12]), make_request(range(20, 32))
    batch, _, _ = build([decode(known, 3), decode(ahead, 1, is_input_on_device=True),
                         chunk(first, 0, 3, slot=0, num_samples=1), chunk(middle, 4, 6, slot=2)], 2)
    assert batch.num_decode.tolist() == [2]
    assert batch.tokens[[0, *range(2, 11)]].tolist() == [5, 10, 11, 12, *range(24, 30)]
    assert batch.token_src.tolist() == [-1, 1, -1, -1]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 5, 11]
    assert batch.kv_lens.tolist() == [5, 5, 3, 10]
    assert batch.row_slots.tolist() == [3, 1, 0, 2]
    assert batch.is_sampled.tolist() == [1, 1, 1, 0]


def test_batch_page_table_is_a_copy_per_group() -> None:
    request = make_request(range(9), num_groups=2)
    request.lease.page_table[1, :3] = [9, 8, 7]
    batch, _, _ = build([chunk(request, 0, 9, slot=0)], 0, make_layout(num_groups=2))
    request.lease.page_table[:] = 15
    assert batch.page_table[:, 0].tolist() == [[1, 2, 3, 0, 0, 0], [9, 8, 7, 0, 0, 0]]


def test_batch_page_table_takes_valid_columns_only() -> None:
    request = make_request(range(5))
    request.lease = Lease(request.namespace, np.full((1, MAX_PAGES), 13, np.int32), num_pages=2)
    batch, _, _ = build([chunk(request, 0, 5, slot=0)], 0)
    assert batch.page_table[0, 0].tolist() == [13, 13, 0, 0, 0, 0]


@pytest.mark.parametrize("start, num_tokens, first_logit, places, targets", [
    (0, 8, 0, range(1, 8), range(101, 108)),          # whole prompt: the last token predicts none of it
    (0, 5, 0, range(1, 6), range(101, 106)),          # first chunk: the next chunk's first token is its last target
    (4, 3, 0, range(1, 4), range(105, 108)),          # middle chunk
    (0, 5, 3, range(4, 6), range(104, 106)),          # from position 3 on
    (4, 4, 6, range(3, 4), range(107, 108)),
    (0, 4, 6, (), ()),                                # not reached yet
    (7, 1, 0, (), ()),                                # only the last token
    (0, 8, None, (), ()),
])
def test_batch_logit_rows_name_flat_tokens_and_their_targets(start: int, num_tokens: int, first_logit: int | None,
                                                             places: Sequence[int], targets: Sequence[int]) -> None:
    """A decode row stands before the chunk, so flat places are shifted by one."""
    request = make_request(range(100, 108))
    row = chunk(request, start, num_tokens, slot=1, first_logit=first_logit)
    _, packed, needs = build([decode(make_request([1, 2], 1), 0), row], 1 + (num_tokens == 1))
    assert needs.num_logit_rows == len(places)
    assert packed.logit_rows[:len(places)].tolist() == list(places)
    assert packed.logit_targets[:len(places)].tolist() == list(targets)
    assert not packed.logit_rows[len(places):].any()


def test_batch_logit_rows_of_two_prompts_follow_each_other() -> None:
    one, other = make_request(range(10, 14)), make_request(range(20, 25))
    _, packed, needs = build([chunk(one, 0, 4, 0, first_logit=1), chunk(other, 0, 5, 1, first_logit=0)], 0)
    assert needs.num_logit_rows == 6
    assert packed.logit_rows[:6].tolist() == [1, 2, 4, 5, 6, 7]
    assert packed.logit_targets[:6].tolist() == [12, 13, 21, 22, 23, 24]


def test_batch_logit_rows_after_preemption_stop_at_the_prompt() -> None:
    """A resumed request computes output tokens in its chunks; only prompt positions are wanted."""
    request = make_request(range(100, 110), num_prompt=6)
    _, packed, needs = build([chunk(request, 4, 6, 0, first_logit=0)], 0)
    assert needs.num_logit_rows == 1 and packed.logit_rows[0] == 0 and packed.logit_targets[0] == 105


# -- sampling parameters


@pytest.mark.parametrize("params, needs_sampling", [
    (dict(), False),
    (dict(temperature=1.0, top_k=1), False),
    (dict(temperature=0.7), True),
    (dict(logprobs=0), True),
    (dict(min_tokens=3), True),
    (dict(presence_penalty=0.5), True),
    (dict(frequency_penalty=0.5), True),
    (dict(repetition_penalty=1.1), True),
    (dict(logit_bias={3: 1.0}), True),
])
def test_needs_sampling_only_where_the_best_token_is_not_enough(params: dict[str, object],
                                                                needs_sampling: bool) -> None:
    request = make_request([1, 2, 3], 2, max_tokens=9, **params)
    assert build([decode(request, 0)], 1)[2].sampling == needs_sampling


def test_needs_no_sampling_after_min_tokens_or_inside_a_prompt() -> None:
    done = make_request([1, 2, 3, 4], 1, max_tokens=9, min_tokens=3)
    assert not build([decode(done, 0)], 1)[2].sampling
    prompt = make_request(range(8), temperature=1.0)
    assert not build([chunk(prompt, 0, 4, 0)], 0)[2].sampling


def test_row_params_carry_each_rows_own_values_and_neutral_padding() -> None:
    layout = make_layout()
    warm = make_request([1, 2, 3], 2, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=0.25,
                        frequency_penalty=-0.5, repetition_penalty=1.25, min_tokens=2, max_tokens=9,
                        seed=(-5, 2**31 - 1), eos_ids=frozenset({4}), stop_token_ids=[9, 2])
    greedy = make_request([1, 2, 3, 4], 3, temperature=0, top_p=0.5, logprobs=1)
    _, packed, needs = build([decode(warm, 0), decode(greedy, 1)], 2, layout)
    params = layout.row_params(packed.row_ints, packed.row_floats)
    assert needs.sampling
    assert params.output_positions.tolist() == [1, 1, 0, 0] and params.tokens_left.tolist() == [1, 1, 0, 0]
    assert params.min_tokens.tolist() == [2, 0, 0, 0] and params.seeds[0].tolist() == [-5, 2**31 - 1]
    assert params.temperature.tolist() == [0.5, 0, 0, 0] and params.top_k.tolist() == [7, 0, 0, 0]
    np.testing.assert_allclose(params.top_p, [0.9, 1, 1, 1])
    np.testing.assert_allclose(params.min_p, [0.1, 0, 0, 0])
    assert params.presence_penalty.tolist() == [0.25, 0, 0, 0] and params.frequency_penalty.tolist() == [-0.5, 0, 0, 0]
    assert params.repetition_penalty.tolist() == [1.25, 1, 1, 1]
    assert params.uses_history.tolist() == [1, 0, 0, 0] and params.wants_logprobs.tolist() == [0, 1, 0, 0]
    assert not params.grammar_states.any() and not params.mask_places.any()
    assert params.stop_ids[0].tolist() == [2, 4, 9] + [NO_TOKEN] * (NUM_STOP_IDS - 3)
    assert (params.stop_ids[1:] == NO_TOKEN).all()


def test_row_params_more_stop_ids_than_places_keep_the_first() -> None:
    layout, request = make_layout(), make_request([1, 2], 1, temperature=1.0, stop_token_ids=list(range(50)))
    _, packed, _ = build([decode(request, 0)], 1, layout)
    assert layout.row_params(packed.row_ints, packed.row_floats).stop_ids[0].tolist() == list(range(NUM_STOP_IDS))


def test_multi_step_plan_always_samples_and_says_how_far() -> None:
    layout, request = make_layout(), make_request([1, 2, 3], 1)
    _, packed, needs = build([decode(request, 0, num_samples=3)], 1, layout, num_steps=3)
    params = layout.row_params(packed.row_ints, packed.row_floats)
    assert needs.sampling and params.tokens_left.tolist() == [3, 0, 0, 0]
    assert params.output_positions[0] == 2


# -- compiled shapes


@pytest.mark.parametrize("num_host_pages, grammar_bytes, num_others", [(0, 0, 3), (5, 0, 5), (0, 1, 4), (5, 1, 6)])
def test_shapes_default_configuration_has_at_most_24_programs(num_host_pages: int, grammar_bytes: int, num_others: int
                                                              ) -> None:
    """Prompt log-probabilities, a row's history and copies of pages; with a host tier also pages out and in, with
    grammars the upload of their tables."""
    shapes = StepShapes.for_engine(EngineConfig(num_host_pages=num_host_pages, grammar_bytes=grammar_bytes))
    assert len(shapes.all()) + len(shapes.row_buckets) + num_others == shapes.num_programs <= MAX_PROGRAMS == 24
    assert shapes.has_host_pages == (num_host_pages > 0) and shapes.has_grammars == (grammar_bytes > 0)


def test_shapes_of_many_configurations_stay_few_and_reach_their_limits() -> None:
    """A forward pass per shape, a sampler per row bucket, and up to six programs of one shape each."""
    for num_host_pages, num_seqs, budget in itertools.product(
            (0, 9), (1, 2, 3, 7, 8, 9, 16, 31, 64, 100, 256, 300, 1000),
            (1, 7, 8, 31, 32, 33, 100, 512, 513, 2000, 2048, 8192, 20_000)):
        shapes = StepShapes.for_engine(EngineConfig(max_num_seqs=num_seqs, prefill_chunk_tokens=budget,
                                                    num_host_pages=num_host_pages))
        assert len(shapes.all()) + len(shapes.row_buckets) + 4 + 2 * (num_host_pages > 0) <= MAX_PROGRAMS
        assert len(set(shapes.all())) == len(shapes.all())
        for buckets in (shapes.row_buckets, shapes.chunk_row_buckets, shapes.chunk_buckets):
            assert list(buckets) == sorted(set(buckets))
        assert shapes.row_buckets[-1] == shapes.chunk_row_buckets[-1] == num_seqs
        assert set(shapes.chunk_row_buckets) <= set(shapes.row_buckets)
        assert budget <= shapes.chunk_buckets[-1] < budget + 8 and shapes.chunk_buckets[-1] % 8 == 0


@pytest.mark.parametrize("budget, largest", [(2000, 2000), (2001, 2008), (7, 8), (1, 8), (512, 512)])
def test_shapes_odd_chunk_budget_is_rounded_up_to_eight(budget: int, largest: int) -> None:
    shapes = StepShapes.for_engine(EngineConfig(prefill_chunk_tokens=budget))
    assert shapes.chunk_buckets[-1] == largest
    assert shapes.fit(1, budget, 0).num_chunk_tokens == largest


@pytest.mark.parametrize("num_seqs, budget", [(1, 7), (5, 100), (32, 512), (100, 2000)])
def test_fit_is_the_smallest_shape_with_room(num_seqs: int, budget: int) -> None:
    shapes = StepShapes.for_engine(EngineConfig(max_num_seqs=num_seqs, prefill_chunk_tokens=budget))
    for num_rows in {1, 2, num_seqs // 2 or 1, num_seqs}:
        for num_chunk in {0, 1, 31, 32, 33, budget // 2, budget} if num_rows <= num_seqs else ():
            if num_chunk > budget or num_rows > num_seqs or num_chunk and num_rows == 0:
                continue
            num_decode = num_rows - (num_chunk > 0)
            fitted = shapes.fit(num_rows, num_decode + num_chunk, num_decode)
            roomy = [s for s in shapes.all() if s.num_rows >= num_rows and s.num_chunk_tokens >= num_chunk
                     and s.has_chunks == bool(num_chunk) and not s.is_short]
            assert fitted == min(roomy, key=lambda s: s.num_tokens)
            assert fitted.num_tokens >= num_decode + num_chunk and fitted in shapes.all()


@pytest.mark.parametrize("num_seqs", [1, 4, 16, 32, 100])
def test_fit_short_rows_share_a_short_shape_while_it_has_room(num_seqs: int) -> None:
    shapes = StepShapes.for_engine(EngineConfig(max_num_seqs=num_seqs))
    for num_rows in {1, 2, num_seqs // 2 or 1, num_seqs}:
        if num_rows > num_seqs:
            continue
        room = shapes.short_capacity(num_rows, num_rows)
        assert room >= num_rows + 4
        fitted = shapes.fit(num_rows, room, num_rows - 1, is_short=True)
        assert fitted.is_short and fitted.num_tokens == room and fitted in shapes.all() and not fitted.has_chunks
        most = shapes.short_capacity(num_rows, 2**30)
        assert room <= most and shapes.fit(num_rows, most, num_rows - 1, is_short=True).num_tokens == most
        assert shapes.fit(num_rows, most + 1, num_rows - 1, is_short=True).has_chunks
        assert shapes.fit(num_rows, room, num_rows - 1).has_chunks
        assert not shapes.fit(num_rows, num_rows, num_rows, is_short=True).is_short


def test_fit_pure_decode_step_has_no_chunk_tokens() -> None:
    shapes = StepShapes.for_engine(EngineConfig(max_num_seqs=16))
    assert shapes.fit(3, 3, 3) == StepShape(8, 0)


@pytest.mark.parametrize("num_rows, num_tokens, what", [(33, 33, "33 rows"), (1, 600, "600 chunk tokens")])
def test_fit_beyond_the_largest_shape_raises(num_rows: int, num_tokens: int, what: str) -> None:
    shapes = StepShapes.for_engine(EngineConfig(max_num_seqs=32, prefill_chunk_tokens=512))
    with pytest.raises(ValueError, match=what):
        shapes.fit(num_rows, num_tokens, num_rows if num_rows > 1 else 0)


@pytest.mark.parametrize("vocab_size", [50, 32_000, 49_152, 151_936])
@pytest.mark.parametrize("grammar_bytes", [2**18, 64 * 2**20, 2**30])
def test_grammar_sizes_stay_within_their_bytes_and_use_them(vocab_size: int, grammar_bytes: int) -> None:
    sizes = GrammarSizes.for_engine(EngineConfig(grammar_bytes=grammar_bytes), vocab_size)
    row_bytes, class_bytes = 4 * -(-vocab_size // 32), 2 * max(vocab_size, 256)
    spent = (row_bytes * sizes.num_rows + STATE_BYTES * sizes.num_states + 2 * sizes.num_transitions
             + class_bytes * (sizes.num_grammars - 1))
    assert spent <= max(grammar_bytes, 2 * row_bytes)
    assert 1 <= sizes.num_grammars <= 65
    if grammar_bytes >= 64 * 2**20 and vocab_size >= 32_000:
        assert spent > 0.99 * grammar_bytes and sizes.num_grammars > 32 and sizes.num_rows > 1000


def test_grammar_sizes_of_no_bytes_hold_the_reserved_places_only() -> None:
    sizes = GrammarSizes.for_engine(EngineConfig(grammar_bytes=0), 49_152)
    assert sizes == GrammarSizes(num_rows=2, num_states=2, num_transitions=1, num_grammars=1)


@pytest.mark.parametrize("changes", [dict(page_size=0), dict(num_pages=-1), dict(max_num_seqs=True),
                                     dict(decode_steps=1.0), dict(max_bypass=-1), dict(reserve_tokens=-5),
                                     dict(num_host_pages=-1), dict(grammar_bytes=-1),
                                     dict(min_ttl_s=-0.5), dict(max_wait_s=float("inf")),
                                     dict(thrash_window_s=float("nan")), dict(max_pinned_fraction=1.5),
                                     dict(thrash_share=-0.1), dict(eviction_policy="fifo")])
def test_config_impossible_size_raises_with_its_name(changes: dict[str, object]) -> None:
    (name, value), = changes.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        EngineConfig(**changes)
