"""The bytes of every token of a vocabulary, and the trie over them. What a grammar makes of them is in `token_dfa.py`.

Supported are byte-level BPE and SentencePiece-like pieces (spaces spelled U+2581, bytes spelled <0x41>), whether they
come from tokenizer files or from a GGUF file. Special tokens have no bytes: they are never text.
"""
from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np

from jradix.errors import TokenizerError
from jradix.tokenizer import BYTE_TOKEN, Tokenizer, byte_level_text

SPACE_MARK = "\u2581"
WORD_BITS = 32


class Trie(NamedTuple):
    """Token bytes as a tree, numbered level by level; node 0 is the root, a node's children are consecutive.

    byte uint8[N]: the last byte of the node's text. first_child, num_children int32[N].
    token_node int32[V]: where the token ends, -1 for tokens without bytes. has_token bool[N].
    """
    byte: np.ndarray
    first_child: np.ndarray
    num_children: np.ndarray
    token_node: np.ndarray
    has_token: np.ndarray


class _SortedTokens(NamedTuple):
    """Tokens with bytes, in the order of these: text n is data[starts[n]:starts[n] + lengths[n]], its token ids[n]."""
    texts: list[bytes]
    ids: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    data: np.ndarray


class Vocabulary:
    """Token ids of a model's head and the bytes each stands for. Immutable.

    Attributes:
      token_bytes: bytes of token i; None for special, unused and end tokens, which are never text.
      num_tokens: width V of the model's head; ids from len(token_bytes) on are padding.
      eos_ids: ids that end the output, ascending.
      is_real: bool[V], ids that an unconstrained request may produce.
      encode: canonical ids of a text without special tokens; None where no tokenizer stands behind the vocabulary.
    """

    def __init__(self, token_bytes: Sequence[bytes | None], *, eos_ids: Iterable[int] = (),
                 num_tokens: int | None = None, is_real: np.ndarray | None = None,
                 encode: Callable[[str], list[int]] | None = None, encoding: str = "") -> None:
        """Makes a vocabulary.

        Args:
          token_bytes: bytes of each token, None or empty where it is no text. Ids at or above `num_tokens` are dropped.
          eos_ids: ids that end the output, each below `num_tokens`.
          num_tokens: width of the head; None: one id for each entry of `token_bytes`.
          is_real: bool[V]; None: every id below len(token_bytes).
          encode: the tokenizer's encoding, for canonical tokens.
          encoding: names what `encode` does, for the fingerprint.

        Raises:
          ValueError: no token, or an end id outside the head.
        """
        width = len(token_bytes) if num_tokens is None else num_tokens
        if width < 1:
            raise ValueError(f"a vocabulary of {width} tokens; expected at least one")
        self.eos_ids = tuple(sorted(set(eos_ids)))
        outside = [i for i in self.eos_ids if not 0 <= i < width]
        if outside:
            raise ValueError(f"end ids {outside} are outside the head of {width} tokens; leave them out")
        ends = set(self.eos_ids)
        self.token_bytes = tuple(b if b and i not in ends else None for i, b in enumerate(token_bytes[:width]))
        self.num_tokens = width
        self.is_real = np.arange(width) < len(token_bytes) if is_real is None else np.array(is_real, bool)
        if self.is_real.shape != (width,):
            raise ValueError(f"is_real has shape {self.is_real.shape}; expected ({width},)")
        self.is_real[list(self.eos_ids)] = True
        self.encode = encode
        self._encoding = encoding

    def with_eos(self, ids: Iterable[int]) -> Vocabulary:
        """The same vocabulary with further end ids (a request's stop tokens); itself where it has them already."""
        missing = set(ids).difference(self.eos_ids)
        if not missing:
            return self
        return Vocabulary(self.token_bytes, eos_ids=(*self.eos_ids, *missing), num_tokens=self.num_tokens,
                          is_real=self.is_real, encode=self.encode, encoding=self._encoding)

    @property
    def num_words(self) -> int:
        """uint32 words of a mask row: token v is bit v // num_words of word v % num_words."""
        return -(-self.num_tokens // WORD_BITS)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits; equal for vocabularies that give equal tables."""
        digest = hashlib.blake2b(f"{self.num_tokens} {self.eos_ids} {self._encoding}".encode(), digest_size=8)
        digest.update(np.packbits(self.is_real).tobytes())
        lengths = [-1 if text is None else len(text) for text in self.token_bytes]
        digest.update(np.array(lengths, "<i4").tobytes())
        digest.update(self.byte_data.tobytes())
        return digest.hexdigest()

    @cached_property
    def byte_starts(self) -> np.ndarray:
        """int32[V + 1]: token v is byte_data[byte_starts[v]:byte_starts[v + 1]], which is empty if it is no text."""
        lengths = np.zeros(self.num_tokens + 1, np.int32)
        lengths[1:len(self.token_bytes) + 1] = [0 if text is None else len(text) for text in self.token_bytes]
        return np.cumsum(lengths, dtype=np.int32)

    @cached_property
    def byte_data(self) -> np.ndarray:
        """uint8: the bytes of all tokens, one after the other."""
        return np.frombuffer(b"".join(text for text in self.token_bytes if text is not None), np.uint8)

    @cached_property
    def missing_bytes(self) -> np.ndarray:
        """bool[256]: bytes that no token spells alone."""
        missing = np.ones(256, bool)
        missing[[text[0] for text in self.token_bytes if text is not None and len(text) == 1]] = False
        return missing

    @cached_property
    def _sorted(self) -> _SortedTokens:
        ids = [i for i, text in enumerate(self.token_bytes) if text is not None]
        ids.sort(key=self.token_bytes.__getitem__)
        texts = [self.token_bytes[i] for i in ids]
        lengths = np.array([len(text) for text in texts], np.int32)
        return _SortedTokens(texts, np.array(ids, np.int32), lengths, np.cumsum(lengths) - lengths,
                             np.frombuffer(b"".join(texts), np.uint8))

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return int(self._sorted.lengths.max(initial=0))

    def longer_than(self, prefix: bytes) -> tuple[list[bytes], np.ndarray]:
        """Bytes of the tokens that begin with `prefix` (not empty) and go on after it, in order; uint8: how they do."""
        texts, _, _, starts, data = self._sorted
        begin = bisect_left(texts, prefix)
        after = _successor(prefix)
        end = len(texts) if after is None else bisect_left(texts, after, begin)
        while begin < end and len(texts[begin]) == len(prefix):
            begin += 1
        return texts[begin:end], data[starts[begin:end] + len(prefix)]

    @cached_property
    def trie(self) -> Trie:
        """The trie over the bytes of all tokens. About 30 ms for 50,000 tokens, once."""
        texts, ids, lengths, starts, data = self._sorted
        node = np.zeros(len(texts), np.int32)       # where the walk down each token's bytes stands
        levels, parents = [np.zeros(1, np.uint8)], []
        active, depth, num_nodes = np.arange(len(texts)), 0, 1
        while (active := active[lengths[active] > depth]).size:
            byte, parent = data[starts[active] + depth], node[active]
            is_new = np.ones(active.size, bool)     # sorted, so that equal prefixes are neighbours
            is_new[1:] = (parent[1:] != parent[:-1]) | (byte[1:] != byte[:-1])
            node[active] = num_nodes - 1 + np.cumsum(is_new)
            levels.append(byte[is_new])
            parents.append(parent[is_new])
            num_nodes += levels[-1].size
            depth += 1
        num_children = np.bincount(np.concatenate(parents), minlength=num_nodes) if parents else np.zeros(1, np.int64)
        token_node = np.full(self.num_tokens, -1, np.int32)
        token_node[ids] = node
        has_token = np.zeros(num_nodes, bool)
        has_token[node] = True
        return Trie(np.concatenate(levels), (1 + np.cumsum(num_children) - num_children).astype(np.int32),
                    num_children.astype(np.int32), token_node, has_token)


@lru_cache(maxsize=8)
def vocabulary_of(tokenizer: Tokenizer, num_tokens: int | None = None, eos_ids: tuple[int, ...] = ()) -> Vocabulary:
    """The vocabulary of `tokenizer`; the same object again for the same arguments.

    Args:
      tokenizer: byte-level or SentencePiece-like.
      num_tokens: width of the model's head; None: the tokenizer's own size.
      eos_ids: end ids beside the tokenizer's own (of the generation config); those outside the head are left out.

    Raises:
      TokenizerError: a decoder that does not put tokens together byte by byte.
    """
    backend = tokenizer.fast.backend_tokenizer
    spell = _token_speller(tokenizer)
    names = backend.get_vocab(with_added_tokens=True)
    width = num_tokens or tokenizer.vocab_size
    special = tokenizer.special_ids
    texts: list[bytes | None] = [None] * max(tokenizer.vocab_size, 1)
    is_real = np.zeros(width, bool)
    for name, i in names.items():
        if i < width:
            is_real[i] = True
            if i not in special:
                texts[i] = spell(name)
    ends = (i for i in (*tokenizer.eos_token_ids, *eos_ids) if 0 <= i < width)
    return Vocabulary(texts, eos_ids=ends, num_tokens=width, is_real=is_real, encoding=tokenizer.fingerprint,
                      encode=partial(tokenizer.encode, add_special_tokens=False))


def _token_speller(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """How the tokenizer's decoder turns one piece into bytes, found by asking it."""
    decoder = tokenizer.fast.backend_tokenizer.decoder
    if decoder is None or decoder.decode(["a", "a", "b"]) != "aab" or decoder.decode(["a</w>", "b"]) != "a</w>b":
        raise TokenizerError(f"{tokenizer.name}: its decoder does not put tokens together byte by byte, so a grammar "
                             "cannot be followed; expected byte-level BPE or SentencePiece with U+2581 for spaces")
    if decoder.decode(["a", byte_level_text(b" ")]) == "a ":
        table = {byte_level_text(bytes([byte])): byte for byte in range(256)}
        return partial(_byte_level_bytes, table)
    has_marks = decoder.decode(["a", SPACE_MARK + "b"]) == "a b"
    return partial(_piece_bytes, has_marks, decoder.decode(["<0x41>"]) == "A")


def _byte_level_bytes(table: dict[str, int], name: str) -> bytes:
    # As the decoder does it: a token with a character outside the alphabet (an added one) is plain text.
    if all(c in table for c in name):
        return bytes(table[c] for c in name)
    return name.encode()


def _piece_bytes(has_marks: bool, has_byte_tokens: bool, name: str) -> bytes:
    byte = BYTE_TOKEN.fullmatch(name) if has_byte_tokens else None
    if byte:
        return bytes([int(byte[1], 16)])
    return (name.replace(SPACE_MARK, " ") if has_marks else name).encode()


def _successor(prefix: bytes) -> bytes | None:
    """The smallest byte string after all that begin with `prefix`; None if there is none."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else None
