"""Grammars that are no finite automaton, followed on the host by llguidance: one matcher for each running request.

A grammar is first a `MatcherSource`, a text that any process can read. A `MatcherPool` reads it for one vocabulary, and
each request then has a `Matcher` of its own. Here is also the walk over plain bytes, which needs no tokenizer. Sources
of JSON schemas are made in `matcher_schema.py`, others in `lark_text.py` and `structural_tag.py`.
"""
from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from jradix.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from jradix.grammar.vocabulary import WORD_BITS, Vocabulary

MAX_SOURCE_CHARS = 2_000_000
# llguidance descends one stack frame per nested rule; this holds the deepest grammar of MAX_SOURCE_CHARS characters.
# It is address space: only what is used becomes memory.
STACK_BYTES = 512 << 20
MAX_READ = 64               # grammars that a pool keeps read, the least recently used go first
LIMITS = dict(max_items_in_row=2_000, initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000,
              max_lexer_states=100_000, max_grammar_size=500_000, verbose_errors=False)
SIGNS_OF_SIZE = ("too large", "too complex", "too many", "too deep", "too big", "limit", "fuel", "exceed",
                 "symbols.len()")
SIGNS_OF_NOTHING = ("unsatisfiable", "is empty")
DEAD_END = "NoExtension"
NO_WAY_ON = ("no token of this vocabulary can go on here, as it lacks a character that the grammar needs; use another "
             "model or grammar")
SHOWN_REASON = 300
DUMP = re.compile("<state>|<grammar>|<backtrace>")
EXCERPT = re.compile(r"\n\s*\d+ \| ")
IN_JSON = "at 1(8): failed to compile JSON schema: "
QUOTED = re.compile('"[^"]*"|while processing .*')
NO_FORCING = '%llguidance {"no_forcing": true}'       # else it narrows masks where one text must come
_stack_size = threading.Lock()


@dataclass(frozen=True)
class MatcherSource:
    """A grammar in llguidance's words.

    Attributes:
      text: the grammar.
      kind: "json_schema", "regex", "choices", "grammar" or "structural_tag"; for messages.
    """
    text: str
    kind: str


def lark_source(lark: str, kind: str) -> MatcherSource:
    """The source of a Lark grammar, once it was read. Raises GrammarError and GrammarTooLarge as `ByteWalker` does."""
    source = MatcherSource(LLMatcher.grammar_from_lark(f"{lark}\n{NO_FORCING}"), kind)
    ByteWalker(source)
    return source


class MatcherPool:
    """Reads grammars for one vocabulary and keeps them read.

    Args:
      vocabulary: of the model's head, with at least one end id.

    Raises:
      GrammarError: the vocabulary has no end id, so that nothing could end a text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.eos_ids:
            raise GrammarError("the vocabulary has no end id, so no text could end; give it one (eos_ids)")
        texts = [_plain(text) for text in vocabulary.token_bytes]
        texts += [b""] * (vocabulary.num_tokens - len(texts))
        self.eos_ids = frozenset(vocabulary.eos_ids)
        self.num_words = vocabulary.num_words
        has_text = np.zeros(WORD_BITS * self.num_words, bool)
        has_text[:len(texts)] = [bool(text) for text in texts]
        self.text_bits = np.packbits(has_text, bitorder="little")
        is_end = np.zeros(WORD_BITS * self.num_words, np.uint8)
        is_end[list(vocabulary.eos_ids)] = 1
        self.end_bits = np.packbits(is_end, bitorder="little")
        self._tokenizer = _ll_tokenizer(texts, vocabulary.eos_ids)
        self._read: OrderedDict[MatcherSource, Matcher] = OrderedDict()

    def check(self, source: MatcherSource) -> None:
        """Reads a grammar and keeps it.

        Raises:
          GrammarError: it is none, or no token of the vocabulary can begin one of its texts.
          GrammarTooLarge: beyond llguidance's limits.
        """
        if source not in self._read:
            matcher = Matcher(self, _read(self._tokenizer, source), source)
            matcher.mask()
            self._read[source] = matcher
            if len(self._read) > MAX_READ:
                self._read.popitem(last=False)
        self._read.move_to_end(source)

    def start(self, source: MatcherSource) -> Matcher:
        """A matcher at the start of a grammar. Raises what `check` raises."""
        self.check(source)
        return self._read[source].copy()


class Matcher:
    """One request on its way through a grammar. Made by `MatcherPool.start`."""
    __slots__ = ("_pool", "_inner", "_source", "_mask", "_has_text", "_has_ended")

    def __init__(self, pool: MatcherPool, inner: LLMatcher, source: MatcherSource) -> None:
        self._pool = pool
        self._inner = inner
        self._source = source
        self._mask: np.ndarray | None = None        # of the present state, once it was asked for
        self._has_text = True                       # whether it allows more than the end; valid with `_mask`
        self._has_ended = False

    def mask(self) -> np.ndarray:
        """uint32[W], read-only: token v is allowed where bit v // W of word v % W is set. At least one is.

        Raises:
          GrammarTooLarge: the grammar is too ambiguous here for llguidance's limits.
          GrammarError: no token of the vocabulary can go on, or llguidance failed.
        """
        assert not self._has_ended, "the request has ended"
        if self._mask is None:
            bits = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
            if self._inner.is_error():
                raise grammar_error(self._inner.get_error(), self._source)
            allowed = self._pool.text_bits.copy()
            allowed[:bits.size] &= bits[:allowed.size]
            allowed[bits.size:] = 0
            self._has_text = bool(allowed.any())
            if self.is_accepting:
                allowed |= self._pool.end_bits
            elif not self._has_text:
                raise grammar_error(DEAD_END, self._source)
            self._mask = planar(allowed)
        return self._mask

    def advance(self, token: int) -> None:
        """Goes on by a token; an end id ends it. Raises GrammarError for one that the mask does not allow."""
        assert not self._has_ended, "the request has ended"
        is_end = token in self._pool.eos_ids
        if is_end and self.is_accepting:
            self._has_ended = True
        elif is_end or self._inner.try_consume_tokens([token]) != 1:
            if self._inner.is_error():
                raise grammar_error(self._inner.get_error(), self._source)
            raise GrammarError(f"{_name(self._source)}: token {token} does not fit here; expected one that the mask "
                               "allows")
        else:
            self._mask = None

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        return self._inner.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether it has ended, or nothing but the end can follow."""
        if self._has_ended:
            return True
        if not self.is_accepting:
            return False
        self.mask()
        return not self._has_text

    def copy(self) -> Matcher:
        """Another request at the same place."""
        twin = Matcher(self._pool, self._inner.deep_copy(), self._source)
        twin._mask, twin._has_text, twin._has_ended = self._mask, self._has_text, self._has_ended
        return twin


class ByteWalker:
    """Follows a grammar over bytes, without a tokenizer.

    Attributes:
      num_taken: bytes accepted so far.

    Raises:
      GrammarError: the source is no grammar, or one without texts; for a JSON schema GrammarUnsupported with what
        llguidance cannot enforce.
      GrammarTooLarge: beyond llguidance's limits.
    """
    __slots__ = ("num_taken", "_inner", "_source")

    def __init__(self, source: MatcherSource) -> None:
        self.num_taken = 0
        self._source = source
        self._inner = _read(_byte_tokenizer(), source)
        self._inner.compute_bitmask()
        if self._inner.is_error():
            raise grammar_error(self._inner.get_error(), source)

    def walk(self, data: bytes) -> bool:
        """Goes on by `data`, up to the first byte that does not fit: False where there is one."""
        taken = self._inner.try_consume_tokens(list(data))
        if self._inner.is_error():
            raise grammar_error(self._inner.get_error(), self._source)
        self.num_taken += taken
        return taken == len(data)

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        return self._inner.is_accepting()

    def copy(self) -> ByteWalker:
        """Another walk at the same place."""
        twin = object.__new__(ByteWalker)
        twin.num_taken, twin._inner, twin._source = self.num_taken, self._inner.deep_copy(), self._source
        return twin


@lru_cache(maxsize=8)
def matcher_pool_of(vocabulary: Vocabulary) -> MatcherPool:
    """The pool of a vocabulary; the same object again for the same one. Making one takes 0.3 s for 50,000 tokens."""
    return MatcherPool(vocabulary)


def planar(bits: np.ndarray) -> np.ndarray:
    """uint32[W], read-only: bit v // W of word v % W for each v whose bit is set in `bits`, uint8[4 * W], low first.

    The 32 planes are turned 8 x 8 bits at a time (Hacker's Delight, section 7-3): 50 us for 49,152 tokens.
    """
    num_words = bits.size // 4
    if num_words % 8:
        rows = np.packbits(np.unpackbits(bits, bitorder="little").reshape(WORD_BITS, -1), axis=1, bitorder="little")
    else:
        rows = bits.reshape(WORD_BITS, -1)
    blocks = np.ascontiguousarray(rows.reshape(4, 8, -1).transpose(0, 2, 1)).view("<u8")
    for shift, mask in ((7, 0x00AA00AA00AA00AA), (14, 0x0000CCCC0000CCCC), (28, 0x00000000F0F0F0F0)):
        moved = (blocks ^ blocks >> np.uint64(shift)) & np.uint64(mask)
        blocks = blocks ^ moved ^ moved << np.uint64(shift)
    words = np.ascontiguousarray(blocks.view(np.uint8).reshape(4, -1).T).view("<u4").reshape(-1)[:num_words]
    words = words.astype(np.uint32, copy=False)
    words.flags.writeable = False
    return words


def grammar_error(message: str, source: MatcherSource) -> GrammarError:
    """llguidance's complaint as our error."""
    message = DUMP.split(message, maxsplit=1)[0].replace("<non-verbose/>", "")
    # Then come the lines of the grammar in question: of use to those who wrote them, and no part of the reason
    reason = " ".join(EXCERPT.split(message, maxsplit=1)[0].removeprefix(IN_JSON).split())
    signs = QUOTED.sub("", reason).lower()
    shown = " ".join(message.split()) if source.kind == "grammar" else reason
    if reason.startswith(DEAD_END):
        shown = NO_WAY_ON
    text = f"{_name(source)}: {shown[:SHOWN_REASON] or 'llguidance stopped without a reason'}"
    if any(sign in signs for sign in SIGNS_OF_SIZE):
        return GrammarTooLarge(f"{text}; beyond what the matcher follows, so use a smaller grammar")
    if any(sign in signs for sign in SIGNS_OF_NOTHING) or source.kind != "json_schema":
        return GrammarError(text)
    return GrammarUnsupported(text)


def _name(source: MatcherSource) -> str:
    return f"{source.kind} in the matcher"


def _read(tokenizer: LLTokenizer, source: MatcherSource) -> LLMatcher:
    if len(source.text) > MAX_SOURCE_CHARS:
        raise GrammarTooLarge(f"{_name(source)}: {len(source.text):,} characters, more than {MAX_SOURCE_CHARS:,}; use "
                              "a smaller grammar")
    found: list[LLMatcher] = []
    reader = threading.Thread(target=lambda: found.append(
        LLMatcher(tokenizer, source.text, log_level=0, limits=LLParserLimits(**LIMITS))))
    with _stack_size:
        usual = threading.stack_size(STACK_BYTES)
        try:
            reader.start()
        finally:
            threading.stack_size(usual)
    reader.join()
    if found[0].is_error():
        raise grammar_error(found[0].get_error(), source)
    return found[0]


class _Tokens:
    """What `TokenizerWrapper` reads: the bytes of all tokens; no text for others, and names for the ends."""
    bos_token_id = None

    def __init__(self, texts: Sequence[bytes], eos_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_ids[0]
        self.special_token_ids = list(eos_ids)
        self.tokens = [text or (b"<|end %d|>" % i if i in set(eos_ids) else b"") for i, text in enumerate(texts)]
        self._id_of = {text: i for i, text in enumerate(texts) if len(text) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self._id_of[data[i:i + 1]] for i in range(len(data)) if data[i:i + 1] in self._id_of]


def _ll_tokenizer(texts: Sequence[bytes], eos_ids: Sequence[int]) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Tokens(texts, eos_ids)), eos_token=list(eos_ids))


@lru_cache(maxsize=1)
def _byte_tokenizer() -> LLTokenizer:
    return _ll_tokenizer([*(_plain(bytes((byte,))) for byte in range(256)), b""], [256])


def _plain(text: bytes | None) -> bytes:
    """The bytes of a token; none for a byte that no UTF-8 text has, which would mark a special token."""
    return text if text is not None and 0xFF not in text else b""
