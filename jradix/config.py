"""Sizes the host and the device must agree on. Plain values: nothing here touches a device."""
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

EVICTION_POLICIES = ("lru", "lfu", "slru")


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one page pool and one page table.

    Attributes:
      layers: indices of the layers of the group.
      window: attention window in tokens, None for full attention.
    """
    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is sized for.

    Attributes:
      page_size: tokens per KV page.
      num_pages: pages of each group's pool, the scratch page not counted.
      max_model_len: longest prompt plus output of one request, in tokens.
      max_num_seqs: requests that run at the same time; one row of a step each.
      prefill_chunk_tokens: prompt tokens computed in one step, over all rows.
      decode_steps: decode steps inside one device call when nothing waits for admission (1: off).
      overlap: plan step n+1 while the device runs step n.
      enable_prefix_caching: False computes every prompt from its first token.
      share_in_batch: a waiting request whose uncached prefix a running one is computing waits for it.
      admission_window: waiting requests looked at, in arrival order, when a row is free.
      max_bypass: times a waiting request may be overtaken before nothing may pass it any more.
      reserve_tokens: output tokens per running request that admission keeps room for.
      eviction_policy: "lru", "lfu" or "slru".
      min_ttl_s: cached prefixes used less than this many seconds ago are spared while an older one can go.
      max_wait_s: how long a request waits, where only such young ones could make room for it.
      max_pinned_fraction: share of the pool that pins may hold, in [0, 1].
      thrash_window_s: seconds over which evicted and recomputed tokens are watched; 0: not at all.
      thrash_share: share of recomputed ones among a window's prompt tokens, above which fewer requests may run
        at once when one more would have to evict.
      num_host_pages: pages of each group that the host's memory takes over when the device's pool is short (0: none).
      grammar_bytes: device memory for the tables of grammars, of all that are in use together (0: no grammars).
      jump_decoding: forced tokens of a grammar are appended without a pass of their own.
      shared_attention: rows that hold the same prefix read its KV together where that pays.
      deterministic: the same tokens give the same bits, whatever is cached and whatever runs beside them. Prompts are
        computed in chunks that begin at multiples of `prefill_chunk_tokens`, one a step; all steps of a kind have one
        shape; and only KV that such chunks wrote is shared.
    """
    page_size: int = 16
    num_pages: int = 1024
    max_model_len: int = 2048
    max_num_seqs: int = 32
    prefill_chunk_tokens: int = 512
    decode_steps: int = 1
    overlap: bool = True
    enable_prefix_caching: bool = True
    share_in_batch: bool = True
    admission_window: int = 32
    max_bypass: int = 64
    reserve_tokens: int = 64
    eviction_policy: str = "lru"
    min_ttl_s: float = 0.0
    max_wait_s: float = 1.0
    max_pinned_fraction: float = 0.5
    thrash_window_s: float = 10.0
    thrash_share: float = 0.25
    num_host_pages: int = 0
    grammar_bytes: int = 64 * 2**20
    jump_decoding: bool = True
    shared_attention: bool = True
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("page_size", "num_pages", "max_model_len", "max_num_seqs", "prefill_chunk_tokens", "decode_steps",
                     "admission_window"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a positive integer")
        for name in ("max_bypass", "reserve_tokens", "num_host_pages", "grammar_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected zero or a positive integer")

        for name in ("min_ttl_s", "max_wait_s", "thrash_window_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected seconds, zero or more")
        for name in ("max_pinned_fraction", "thrash_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected a number from 0 to 1")
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ValueError(f"eviction_policy={self.eviction_policy!r}: expected one of "
                             f"{', '.join(EVICTION_POLICIES)}")
        if self.deterministic:
            self._check_deterministic()

    def _check_deterministic(self) -> None:
        for name, neutral in (("decode_steps", 1), ("jump_decoding", False), ("shared_attention", False)):
            if getattr(self, name) != neutral:
                raise ValueError(f"{name}={getattr(self, name)!r} with deterministic=True: tokens would be computed in "
                                 f"another way where their neighbours allow it; expected {name}={neutral!r}")
        if self.prefill_chunk_tokens % self.page_size:
            raise ValueError(f"prefill_chunk_tokens={self.prefill_chunk_tokens} with deterministic=True: expected a "
                             f"multiple of page_size={self.page_size}, since chunks are shared as whole pages")

    @property
    def hit_granularity(self) -> int:
        """Cached prefixes are used up to a multiple of this many tokens."""
        return self.prefill_chunk_tokens if self.deterministic else 1

    @property
    def max_pages_per_seq(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_model_len // self.page_size)

    @property
    def pool_tokens(self) -> int:
        """Tokens one group's pool holds."""
        return self.num_pages * self.page_size


NUM_RESERVED_STATES = 2     # no grammar, and ended; so are mask rows 0 and 1
STATE_BYTES = 13


@dataclass(frozen=True)
class GrammarSizes:
    """Capacity of the device's grammar tables, shared by all grammars in use.

    Attributes:
      num_rows: distinct mask rows of one bit per token, the reserved ones included.
      num_states: the reserved ones included.
      num_transitions: 16-bit entries, classes times states.
      num_grammars: grammar 0, which is none, included.
    """
    num_rows: int
    num_states: int
    num_transitions: int
    num_grammars: int

    @classmethod
    def for_engine(cls, config: EngineConfig, vocab_size: int) -> GrammarSizes:
        """Shares `grammar_bytes` out: 7/16 to mask rows, 1/4 each to transitions and token classes, 1/16 to states.

        Token classes of twice as many grammars as can run at once are enough; what they leave goes to mask rows.
        """
        total = config.grammar_bytes
        class_bytes = 2 * max(vocab_size, 256)
        num_grammars = 1 + min(total // 4 // class_bytes, 2 * config.max_num_seqs) if total else 1
        num_transitions, num_states = total // 4 // 2, total // 16 // STATE_BYTES
        rest = total - class_bytes * (num_grammars - 1) - 2 * num_transitions - STATE_BYTES * num_states
        num_rows = min(rest // (4 * -(-vocab_size // 32)), num_states)
        return cls(max(num_rows, NUM_RESERVED_STATES), max(num_states, NUM_RESERVED_STATES), max(num_transitions, 1),
                   num_grammars)


ROW_BUCKETS = (1, 8, 16, 32, 64, 128, 256)
CHUNK_BUCKETS = (32, 64, 128, 256, 512, 2048, 8192)
SHORT_TOKENS = 16     # longest row of a short step
SHARED_MEMBERS = 16  # queries that read a shared prefix together, in one part of a group
MAX_PROGRAMS = 24


@dataclass(frozen=True)
class SharingCost:
    """What attention to a prefix costs, in units of one query that reads one key by itself.

    Attributes:
      read: per key of the prefix, for each part of up to `SHARED_MEMBERS` queries.
      member: per key of the prefix and query of a part.
      part: per part, whatever its length.
    """
    read: float = 0.6
    member: float = 0.4
    part: float = 200.0

    def gain(self, num_queries: int, num_tokens: int) -> float:
        """What is saved when so many queries read a prefix of so many tokens together."""
        parts = -(-num_queries // SHARED_MEMBERS)
        return num_tokens * (num_queries * (1 - self.member) - parts * self.read) - parts * self.part


@dataclass(frozen=True, order=True)
class StepShape:
    """Static sizes of one compiled step.

    Attributes:
      num_rows: S, rows (requests) of the step.
      num_chunk_tokens: C, flat tokens beside one per row; T = S + C.
      is_short: its rows are a few tokens long, so that attention takes each token as a decode row of its own.
    """
    num_rows: int
    num_chunk_tokens: int
    is_short: bool = False

    def __post_init__(self) -> None:
        if self.is_short and self.num_chunk_tokens < 1:
            raise ValueError(f"{self}: a short shape has more tokens than rows, else no row could bring two")

    @property
    def num_tokens(self) -> int:
        return self.num_rows + self.num_chunk_tokens

    @property
    def has_chunks(self) -> bool:
        return self.num_chunk_tokens > 0 and not self.is_short

    @property
    def num_shared_parts(self) -> int:
        """Parts of groups with a shared prefix that the step has room for, whichever queries form them."""
        return (self.num_tokens if self.is_short else self.num_rows) // 2


@dataclass(frozen=True)
class StepShapes:
    """All compiled shapes of an engine, ascending.

    Padding costs time and every shape costs a compilation. Steps of decode rows alone are the many, so they get all row
    buckets, and each of them a short shape too, for jumps and the last tokens of prompts. Steps with prefill chunks get
    few row buckets and many chunk buckets: all with the smaller row bucket, every other one, counted from the largest,
    with the other. With a sampler per row bucket and the programs of one shape there are at most `MAX_PROGRAMS`.
    A deterministic engine has one shape of either kind, so that nothing depends on how full a step is.

    Attributes:
      row_buckets: S of steps without chunks.
      chunk_row_buckets: S of steps with chunks, some of the row buckets.
      chunk_buckets: C of steps with chunks.
      short_row_buckets: S of short steps, some of the row buckets.
      has_host_pages: pages also move between device and host.
      has_grammars: grammar tables are uploaded.
    """
    row_buckets: tuple[int, ...]
    chunk_row_buckets: tuple[int, ...]
    chunk_buckets: tuple[int, ...]
    short_row_buckets: tuple[int, ...] = ()
    has_host_pages: bool = False
    has_grammars: bool = False

    @classmethod
    def for_engine(cls, config: EngineConfig) -> StepShapes:
        largest_chunk = -(-config.prefill_chunk_tokens // 8) * 8
        if config.deterministic:
            rows = (config.max_num_seqs,)
            return cls(rows, rows, (largest_chunk,), (), config.num_host_pages > 0, config.grammar_bytes > 0)
        rows = _buckets(ROW_BUCKETS, config.max_num_seqs)
        chunks = _buckets(CHUNK_BUCKETS, largest_chunk)
        while True:
            chunk_rows = tuple(sorted({rows[min(1, len(rows) - 1)], rows[-1]}))
            shapes = cls(rows, chunk_rows, chunks, rows, config.num_host_pages > 0, config.grammar_bytes > 0)
            if shapes.num_programs <= MAX_PROGRAMS:
                return shapes
            if len(chunks) > 5 or len(rows) <= 4:
                chunks = chunks[1:]
            else:
                rows = rows[:1] + rows[2:]

    @property
    def num_programs(self) -> int:
        """Forward passes, a sampler per row bucket, prompt log-probabilities, the setting of a row's history, and the
        copying of pages, with host pages also out of and into the device's pool, with grammars the upload of tables."""
        return len(self.all()) + len(self.row_buckets) + 3 + 2 * self.has_host_pages + self.has_grammars

    def all(self) -> list[StepShape]:
        return [*(StepShape(rows, 0) for rows in self.row_buckets), *map(_short_shape, self.short_row_buckets),
                *self._chunk_shapes]

    @cached_property
    def _chunk_shapes(self) -> list[StepShape]:
        few, several = self.chunk_row_buckets[:1], self.chunk_row_buckets
        num = len(self.chunk_buckets)
        return [StepShape(rows, chunk) for i, chunk in enumerate(self.chunk_buckets, 1)
                for rows in (few if (num - i) % 2 else several)]

    def fit(self, num_rows: int, num_tokens: int, num_decode: int, *, is_short: bool = False) -> StepShape:
        """The smallest shape that holds `num_rows` rows and `num_tokens` tokens, `num_decode` of them decode rows.

        Args:
          is_short: no row has more than `SHORT_TOKENS` tokens.
        """
        if num_tokens == num_decode:
            return StepShape(_first_at_least(self.row_buckets, num_rows, "rows"), 0)
        if is_short:
            for shape in map(_short_shape, self.short_row_buckets):
                if shape.num_rows >= num_rows and shape.num_tokens >= num_tokens:
                    return shape
        rows = _first_at_least(self.chunk_row_buckets, num_rows, "rows")
        chunk = _first_at_least(self.chunk_buckets, num_tokens - num_decode, "chunk tokens")
        return min((shape for shape in self._chunk_shapes
                    if shape.num_rows >= rows and shape.num_chunk_tokens >= chunk), key=lambda shape: shape.num_tokens)

    def short_capacity(self, num_rows: int, num_tokens: int) -> int:
        """Tokens that a short step should hold for so many rows that want `num_tokens` in all: the largest shape that
        they fill, or else the smallest that has room for the rows; 0 where there is none.
        """
        sizes = [shape.num_tokens for shape in map(_short_shape, self.short_row_buckets) if shape.num_rows >= num_rows]
        return max((size for size in sizes if size <= num_tokens), default=min(sizes, default=0))


def _buckets(ladder: tuple[int, ...], largest: int) -> tuple[int, ...]:
    return (*(b for b in ladder if b < largest), largest)


def _short_shape(num_rows: int) -> StepShape:
    """Room for jumps in about every third row; in all 8, 16, 32, 48, ... tokens, since matrix products on CPUs go by
    sixteen rows, and a part of sixteen costs as much."""
    num_tokens = 8 if num_rows == 1 else -(-(num_rows + max(4, min(num_rows, 64) // 2)) // 16) * 16
    return StepShape(num_rows, num_tokens - num_rows, is_short=True)


def _first_at_least(buckets: tuple[int, ...], n: int, what: str) -> int:
    for bucket in buckets:
        if bucket >= n:
            return bucket
    raise ValueError(f"{n} {what} in one step, but the largest compiled shape has {buckets[-1]}")
