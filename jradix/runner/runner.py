"""The model runner: compiled steps by shape, and the device state they are chained through.

It owns the KV, the RowState, the grammar tables and the pages in the host's memory.
"""
from __future__ import annotations

import logging
from pathlib import Path
from typing import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jradix.batch import LOGIT_BLOCK, GrammarTables, MoveKind, PackedBatch, PageMove, StepLayout
from jradix.config import EngineConfig, GrammarSizes, SharingCost, StepShape, StepShapes
from jradix.models.config import ModelConfig
from jradix.models.decoder import Decoder, split_model
from jradix.ops.attention import check_implementation, sound_implementation
from jradix.ops.grammar import GrammarArena, make_arena
from jradix.ops.kv_cache import KVCache, make_kv_cache
from jradix.runner.grammar_upload import blank_block, check_tables, grammar_blocks, make_upload_grammar
from jradix.runner.host_pages import HostPages
from jradix.runner.kv_store import fill_pages, read_pages, write_pages
from jradix.runner.page_moves import (PAGES_PER_CALL, batch_moves, check_moves, make_copy_pages, make_gather_pages,
                                      make_scatter_pages, padded_ids)
from jradix.runner.step import (RowState, StepOutput, StepSettings, make_decode_steps, make_forward,
                                make_prompt_logprobs, make_sampling, reset_rows)
from pallas_kernels.blocks import tuned_sharing

logger = logging.getLogger("jradix")


class ModelRunner:
    """Runs steps. Every call consumes the KV and RowState of the one before: that chain is the only fence.

    Args:
      model: weights on `device`.
      config: sizes of the engine.
      kv_dtype: type of the KV pages.
      num_valid_tokens: ids the tokenizer knows, at most the model's vocabulary.
      eos_ids: end tokens, the only ones allowed after the end of a grammar's text.
      token_bytes: bytes of each token, None for special ones; for grammars whose tables are made of bytes.
      implementation: attention by name, None for the default.

    Raises:
      ValueError, UnsupportedKernel: an `implementation` that does not exist or cannot run on the device.

    Attributes:
      shapes: of all steps.
      sharing_cost: what reading a shared prefix together costs on this device: measured, or a guess for others.
    """

    def __init__(self, model: Decoder, model_config: ModelConfig, config: EngineConfig, *, device: jax.Device,
                 kv_dtype: jnp.dtype, num_valid_tokens: int | None = None, eos_ids: Sequence[int] = (),
                 token_bytes: Sequence[bytes | None] | None = None, implementation: str | None = None):
        self.config = config
        self.device = device
        check_implementation(implementation, device.platform)
        if implementation is None and device.platform != "cpu":
            windows = [window for window in model_config.layer_windows if window is not None]
            implementation = sound_implementation(
                device, num_heads=model_config.num_heads, num_kv_heads=model_config.num_kv_heads,
                head_dim=model_config.head_dim, page_size=config.page_size, kv_dtype=kv_dtype,
                sliding_window=min(windows, default=None))
        self.shapes = StepShapes.for_engine(config)
        self.sharing_cost = SharingCost(**(tuned_sharing(device.device_kind) or {}))
        self._model_config = model_config
        self._kv_dtype = kv_dtype
        _, self._leaves, self._merge = split_model(model)
        vocab_size = model_config.vocab_size
        self._settings = StepSettings(
            head_dim=model_config.head_dim, vocab_size=vocab_size,
            num_valid_tokens=min(num_valid_tokens or vocab_size, vocab_size),
            layer_windows=tuple(model_config.layer_windows), groups=model_config.kv_groups(),
            implementation=implementation, platform=device.platform)
        self.grammar_sizes = GrammarSizes.for_engine(config, vocab_size)
        self._eos_ids, self._token_bytes = tuple(eos_ids), token_bytes
        self._programs: dict[tuple, Callable] = {}
        self._layouts: dict[StepShape, StepLayout] = {}
        self._reset_rows = jax.jit(reset_rows, donate_argnums=0)
        self._num_logit_rows = -(-self.shapes.all()[-1].num_tokens // LOGIT_BLOCK) * LOGIT_BLOCK
        self._is_warm = False
        self.kv: KVCache | None = None
        self._rows: RowState | None = None
        self._arena: GrammarArena | None = None
        self._no_masks: dict[int, jax.Array] = {}
        self.host_pages: HostPages | None = None
        self._is_moving = False
        self.reset_state()

    def reset_state(self) -> None:
        """New KV pages and row state, all zero, new host pages, no grammars; the old ones are given up first."""
        self._delete_state()
        self._is_moving = False
        c, m = self.config, self._model_config
        self.kv = make_kv_cache(num_layers=m.num_layers, num_pages=c.num_pages, page_size=c.page_size,
                                kv_width=m.kv_width, dtype=self._kv_dtype, device=self.device)
        rows, vocab = c.max_num_seqs + 1, m.vocab_size
        self._rows = RowState(*(jnp.zeros(shape, dtype, device=self.device) for shape, dtype in (
            (rows, jnp.int32), ((rows, vocab), jnp.int32), ((rows, vocab), bool), ((rows, vocab), jnp.float32),
            (rows, jnp.int32))))
        sizes = self.grammar_sizes
        self._arena = make_arena(
            num_rows=sizes.num_rows, num_states=sizes.num_states, num_transitions=sizes.num_transitions,
            num_grammars=sizes.num_grammars, vocab_size=vocab, num_valid_tokens=self.num_valid_tokens,
            eos_ids=self._eos_ids, token_bytes=self._token_bytes, device=self.device)
        if c.num_host_pages:
            self.host_pages = HostPages(num_pages=c.num_host_pages, groups=self._settings.groups, page_size=c.page_size,
                                        num_kv_heads=m.num_kv_heads, head_dim=m.head_dim, dtype=self._kv_dtype)

    @property
    def spare_slot(self) -> int:
        """The slot of `RowState` that padding rows write to."""
        return self.config.max_num_seqs

    @property
    def num_valid_tokens(self) -> int:
        """Token ids that may be given and are ever sampled: [0, num_valid_tokens)."""
        return self._settings.num_valid_tokens

    @property
    def num_compiled(self) -> int:
        """Programs in use, each compiled once: forward shapes, samplers, and the rest."""
        return len(self._programs)

    @property
    def num_groups(self) -> int:
        return len(self._settings.groups)

    @property
    def is_intact(self) -> bool:
        """False when a failed call consumed the device state without returning a new one, or moves were left undone."""
        return (self.kv is not None
                and not any(a.is_deleted() for a in jax.tree.leaves((self.kv, self._rows, self._arena)))
                and not self._is_moving and (self.host_pages is None or self.host_pages.is_intact))

    def layout(self, shape: StepShape) -> StepLayout:
        """Where the fields of a step of this shape lie in its buffers."""
        if shape not in self._layouts:
            self._layouts[shape] = StepLayout(shape, num_groups=len(self._settings.groups),
                                              max_pages=self.config.max_pages_per_seq,
                                              page_size=self.config.page_size,
                                              num_logit_rows=self._num_logit_rows,
                                              vocab_size=self._settings.vocab_size,
                                              shared_attention=self.config.shared_attention)
        return self._layouts[shape]

    def dispatch(self, packed: PackedBatch, shape: StepShape, *, num_steps: int = 1, needs_sampling: bool = False,
                 num_logit_rows: int = 0) -> StepOutput:
        """Starts a step and returns its results, still on the device; nobody waits.

        Args:
          packed: buffers in the layout of `shape`. They must not be written afterwards: on CPU the step reads them
            where they lie.
          num_steps: decode steps in this call; more than one only without chunk tokens, and without `row_masks`.
          needs_sampling: some row does not simply take its most probable token, has a grammar or mask, or wants
            log-probabilities.
          num_logit_rows: leading entries of `packed.logit_rows` that are wanted.
        """
        if num_steps > 1:
            run = self._program(("decode steps", shape.num_rows, num_steps), lambda: make_decode_steps(
                self._merge, self.layout(shape), self._settings, num_steps), (1, 2))
            tokens, sampled, self.kv, self._rows = run(self._leaves, self.kv, self._rows, self._arena, packed.ints,
                                                       packed.row_ints, packed.row_floats)
            return StepOutput(tokens, sampled, None)
        kind = "short forward" if shape.is_short else "forward"
        run = self._program((kind, shape.num_rows, shape.num_chunk_tokens), lambda: make_forward(
            self._merge, self.layout(shape), self._settings), (1, 2))
        done, self.kv, self._rows = run(self._leaves, self.kv, self._rows, packed.ints, packed.logit_rows)
        tokens, sampled, prompt = done.tokens, None, None
        if needs_sampling:
            run = self._program(("sampling", shape.num_rows),
                                lambda: make_sampling(self.layout(shape), self._settings), 0)
            masks = (jax.device_put(packed.row_masks, self.device) if len(packed.row_masks)     # as the others: else it
                     else self._zero_masks(shape.num_rows))                                     # is another program
            tokens, sampled, self._rows = run(self._rows, self._arena, tokens, done.logits, done.slots, packed.row_ints,
                                              packed.row_floats, masks)
        if num_logit_rows:
            run = self._program(("prompt log-probabilities",),
                                lambda: make_prompt_logprobs(self._merge, self._settings))
            prompt = run(self._leaves, done.wanted, packed.logit_targets, np.int32(num_logit_rows))
        return StepOutput(tokens, sampled, prompt)

    def upload_grammar(self, tables: GrammarTables) -> None:
        """Puts a grammar's tables on the device; the next step finds them there. Nobody waits.

        Steps that run already see the tables as they were. Costs by the size of the tables, in calls of a fixed size.

        Raises:
          ValueError: the tables do not fit where they are to go, or are made of bytes and the runner does not know
            those of the tokens; nothing was changed.
        """
        check_tables(tables, self.grammar_sizes, vocab_size=self._settings.vocab_size,
                     has_token_bytes=self._token_bytes is not None)
        run = self._program(("upload grammar",), make_upload_grammar, 0)
        for block in grammar_blocks(tables, self.grammar_sizes, self._settings.vocab_size):
            self._arena = run(self._arena, block)

    def _zero_masks(self, num_rows: int) -> jax.Array:
        """What a step without masks of its own is given: on the device already."""
        if num_rows not in self._no_masks:
            shape = num_rows, -(-self._settings.vocab_size // 32)
            self._no_masks[num_rows] = jnp.zeros(shape, jnp.uint32, device=self.device)
        return self._no_masks[num_rows]

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        """Carries out moves between device and host pages; the next step finds them done.

        Copies on the device, and those to the host, are only started. A page that comes in from the host right after it
        went out waits for it, and with many copies to the host under way the oldest is waited for. A call that fails
        half-way leaves the runner not `is_intact`. Costs by the pages moved, whatever the size of the pool.

        Raises:
          ValueError: a page that does not exist, or host pages without a host tier; nothing was moved.
        """
        check_moves(moves, num_groups=self.num_groups, num_pages=self.config.num_pages,
                    num_host_pages=self.config.num_host_pages)
        self._is_moving = True
        if self.host_pages is not None:
            self.host_pages.fetch_ready()
        for move in batch_moves(moves):
            self._move_batch(move)
        self._is_moving = False

    def _move_batch(self, move: PageMove) -> None:
        """One device call, for one batch of `batch_moves`."""
        groups, count = self._settings.groups, np.int32(move.source.shape[1])
        if move.kind is MoveKind.COPY:
            run = self._program(("copy pages",), lambda: make_copy_pages(self._settings.group_of_layer), 0)
            self.kv = run(self.kv, padded_ids(move.source), padded_ids(move.target), count)
        elif move.kind is MoveKind.OUT:
            run = self._program(("gather pages",), lambda: make_gather_pages(groups))
            self.host_pages.defer(run(self.kv, padded_ids(move.source)), move.target)
            self.host_pages.fetch_ready()
        else:
            run = self._program(("scatter pages",), lambda: make_scatter_pages(groups), 0)
            contents = self.host_pages.read(move.source, PAGES_PER_CALL)
            self.kv = run(self.kv, padded_ids(move.target), contents, count)

    def save_pages(self, folder: Path, page_ids: np.ndarray, host_page_ids: np.ndarray) -> None:
        """Writes the content of int32[G, n] device pages and int32[G, m] host pages to a folder, in this order.

        Raises:
          SnapshotError: the folder cannot be written.
        """
        write_pages(folder, self.kv, page_ids, num_kv_heads=self._model_config.num_kv_heads, groups=self._group_layers,
                    host_page_ids=host_page_ids, read_host=self._read_host)

    def load_pages(self, folder: Path, rows: np.ndarray, page_ids: np.ndarray, num_rows: int) -> None:
        """Brings rows int[n] of a saved folder, which has `num_rows`, into device pages int32[G, n].

        Raises:
          SnapshotError: a file is missing or damaged; the pages' content is undefined, the others are as they were.
        """
        for block in read_pages(folder, self.kv, rows, page_ids, num_rows=num_rows,
                                num_kv_heads=self._model_config.num_kv_heads, groups=self._group_layers):
            self._is_moving = True
            self.kv = fill_pages(self.kv, block)
            self._is_moving = False

    @property
    def _group_layers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(group.layers for group in self._settings.groups)

    def _read_host(self, layer: int, page_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        keys, values = self.host_pages.layer(layer)
        return keys[page_ids], values[page_ids]

    def set_history(self, slot: int, *, prompt_ids: np.ndarray, output_ids: np.ndarray,
                    logit_bias: dict[int, float]) -> None:
        """Tells the device what a request's tokens are so far; needed where penalties or a bias apply."""
        vocab = self._settings.vocab_size
        in_prompt = np.zeros(vocab, bool)
        in_prompt[prompt_ids] = True
        bias = np.zeros(vocab, np.float32)
        bias[list(logit_bias)] = list(logit_bias.values())
        counts = np.bincount(output_ids, minlength=vocab).astype(np.int32)
        self._rows = self._reset_rows(self._rows, np.int32(slot), counts, in_prompt, bias)

    def replace_weights(self, model: Decoder) -> None:
        """Runs the compiled steps on other weights of the same shapes; the old ones are deleted."""
        _, leaves, _ = split_model(model)
        if [(a.shape, a.dtype) for a in leaves] != [(a.shape, a.dtype) for a in self._leaves]:
            raise ValueError("the new weights differ in number, shape or dtype from those the runner was built for")
        kept = {id(leaf) for leaf in leaves}
        old, self._leaves = self._leaves, leaves
        for leaf in old:
            if id(leaf) not in kept:
                leaf.delete()

    def warmup(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every program by running it on padding. A compilation after this is logged as a warning.

        Args:
          progress: called with (shapes done, shapes in all).
        """
        shapes = self.shapes.all()
        nothing = np.zeros(0, np.int32)
        for i, shape in enumerate(shapes):
            if progress:
                progress(i, len(shapes))
            packed = self.layout(shape).allocate()
            self.layout(shape).step_batch(packed.ints).row_slots.fill(self.spare_slot)
            is_decode = not shape.num_chunk_tokens
            self.dispatch(packed, shape, needs_sampling=is_decode, num_logit_rows=1)
            if self.config.decode_steps > 1 and is_decode:
                self.dispatch(packed, shape, num_steps=self.config.decode_steps)
        self.set_history(self.spare_slot, prompt_ids=nothing, output_ids=nothing, logit_bias={})
        if self.config.grammar_bytes:
            run = self._program(("upload grammar",), make_upload_grammar, 0)
            self._arena = run(self._arena, blank_block(self.grammar_sizes, self._settings.vocab_size))
        no_pages = np.zeros((self.num_groups, 0), np.int32)
        for kind in MoveKind if self.host_pages is not None else (MoveKind.COPY,):
            self._move_batch(PageMove(kind, no_pages, no_pages))
        if progress:
            progress(len(shapes), len(shapes))
        self._is_warm = True

    def close(self) -> None:
        """Deletes weights, KV and state from the device at once. The runner is unusable afterwards."""
        self._delete_state()
        for leaf in self._leaves:
            leaf.delete()
        self._leaves = []
        self._programs.clear()

    def _program(self, key: tuple, make: Callable[[], Callable], donate: int | tuple[int, ...] = ()) -> Callable:
        """The compiled program of this name and size, compiled by its first call."""
        program = self._programs.get(key)
        if program is None:
            if self._is_warm:
                logger.warning("compiling after warm-up: %s was not among the warmed programs", key)
            program = self._programs[key] = jax.jit(make(), donate_argnums=donate)
        return program

    def _delete_state(self) -> None:
        for array in jax.tree.leaves((self.kv, self._rows, self._arena)):
            if not array.is_deleted():
                array.delete()
        self.kv = self._rows = self._arena = self.host_pages = None
