"""Builds a fast tokenizer from the metadata of a GGUF file: byte-level BPE ("gpt2") and SentencePiece ("llama").

It sees metadata only; tensors are the weight loader's.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any


from jradix.errors import TokenizerError

if TYPE_CHECKING:
    import tokenizers
    import transformers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"
WAY_OUT = "Take the tokenizer from the original model's folder"



def fast_tokenizer_from_metadata(metadata: dict[str, Any], *, source: str
                                 ) -> tuple[transformers.PreTrainedTokenizerFast, tuple[int, ...]]:
    """The tokenizer that `metadata` describes, and the ids that end a turn or message beside its EOS.

    Raises:
      TokenizerError: no tokenizer inside, a kind or pre-tokenizer that is not supported, or inconsistent tables.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or not tokens:
        raise TokenizerError(f"{source} holds no tokenizer (tokenizer.ggml.model and .tokens). {WAY_OUT}")
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(f"{source}: tokenizer model {kind!r} is not supported; supported: 'gpt2' (byte-level BPE) "
                             f"and 'llama' (SentencePiece). {WAY_OUT}")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise TokenizerError(f"{source}: {len(tokens)} tokens, {len(set(tokens))} of them different, and {len(types)} "
                             "token types; expected one type for each token and no token twice")
    build = _byte_level_bpe if kind == "gpt2" else _sentencepiece
    backend = build(metadata, tokens, types, source)
    _add_tokens(backend, tokens, types)
    return _wrap(backend, metadata, tokens, kind, source)


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken
    special = [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k in (CONTROL, UNKNOWN)]
    user = [AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, types) if k == USER_DEFINED and t]
    backend.add_special_tokens(special)
    backend.add_tokens(user)


def _wrap(backend: tokenizers.Tokenizer, metadata: dict[str, Any], tokens: list[str], kind: str, source: str
          ) -> tuple[transformers.PreTrainedTokenizerFast, tuple[int, ...]]:
    from transformers import PreTrainedTokenizerFast

    def token_id(name: str) -> int | None:
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if i is not None and not 0 <= i < len(tokens):
            raise TokenizerError(f"{source}: {name}_token_id={i} is outside the vocabulary of {len(tokens)} tokens")
        return i

    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {role: tokens[i] for role, name in names.items() if (i := token_id(name)) is not None}
    # llama.cpp's defaults for files that leave the flag out
    adds_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") in LLAMA3_NAMES
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and "bos_token" in special
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", False) and "eos_token" in special
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, add_bos_token=bool(adds_bos), add_eos_token=bool(adds_eos),
                                   clean_up_tokenization_spaces=False, **special)
    template = metadata.get("tokenizer.chat_template")
    if template:
        fast.chat_template = template
    extra = [token_id(name) for name in ("eot", "eom")]
    return fast, tuple(i for i in extra if i is not None)


# Byte-level BPE

LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2_split() -> tokenizers.pre_tokenizers.PreTokenizer:
    from tokenizers import pre_tokenizers
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2_split() -> tokenizers.pre_tokenizers.PreTokenizer:
    from tokenizers import pre_tokenizers
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _regex_split(numbers: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    from tokenizers import Regex, pre_tokenizers
    words = pre_tokenizers.Split(Regex("|".join((_CONTRACTION, _WORDS, numbers, _REST))), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _llama3_split() -> tokenizers.pre_tokenizers.PreTokenizer:
    return _regex_split(r"\p{N}{1,3}")


def _qwen2_split() -> tokenizers.pre_tokenizers.PreTokenizer:
    return _regex_split(r"\p{N}")


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("", "default", "gpt-2"), _gpt2_split),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell"), _digits_then_gpt2_split),
    **dict.fromkeys(LLAMA3_NAMES, _llama3_split),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _qwen2_split),
}


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str], types: list[int], source: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers
    pre = metadata.get("tokenizer.ggml.pre", "")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(repr(name) for name in PRE_TOKENIZERS if name)
        raise TokenizerError(f"{source}: pre-tokenizer {pre!r} is not supported; supported: {known}. {WAY_OUT}")
    ids = {token: i for i, token in enumerate(tokens)}
    merges = _checked_merges(metadata.get("tokenizer.ggml.merges"), ids, source)
    backend = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre in LLAMA3_NAMES))
    if PRE_TOKENIZERS[pre] is _qwen2_split:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _checked_merges(merges: list[str] | None, ids: dict[str, int], source: str) -> list[tuple[str, str]]:
    if merges is None:
        raise TokenizerError(f"{source}: byte-level BPE without tokenizer.ggml.merges; expected the merge list")
    pairs = []
    for merge in merges:
        pair = tuple(merge.split(" "))
        if len(pair) != 2 or not (pair[0] in ids and pair[1] in ids and pair[0] + pair[1] in ids):
            raise TokenizerError(f"{source}: merge {merge!r} is not two tokens that make a third; the file is damaged")
        pairs.append(pair)
    return pairs


# SentencePiece

def _sentencepiece(metadata: dict[str, Any], tokens: list[str], types: list[int], source: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers
    scores = metadata.get("tokenizer.ggml.scores")
    merges = metadata.get("tokenizer.ggml.merges")
    if (scores is None and merges is None) or (scores is not None and len(scores) != len(tokens)):
        raise TokenizerError(f"{source}: {len(tokens)} SentencePiece tokens and {len(scores or ())} scores; expected "
                             "one score for each token")
    ids = {token: i for i, token in enumerate(tokens)}
    has_bytes = types.count(BYTE) == 256
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if unknown is None:
        unknown = types.index(UNKNOWN) if UNKNOWN in types else None
    # The trainer of BPE scores its pieces 0, -1, -2, ...; a unigram model's are log-probabilities.
    is_unigram = merges is None and any(s != int(s) for s, k in zip(scores, types) if k == NORMAL)
    if is_unigram:
        # Only normal pieces may be found in text; the model has no flag for that, so the others cost too much.
        worst = min(scores) - 1e5
        pieces = [(t, s if k == NORMAL else worst) for t, s, k in zip(tokens, scores, types)]
        model = models.Unigram(pieces, unk_id=unknown, byte_fallback=has_bytes)
    else:
        if merges is None:
            pairs = _merges_by_score(tokens, types, scores, ids)
        else:
            pairs = _checked_merges(merges, ids, source)
        model = models.BPE(vocab=ids, merges=pairs, byte_fallback=has_bytes, fuse_unk=True,
                           unk_token=None if unknown is None else tokens[unknown])
    backend = Tokenizer(model)
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    # A piece of text after a control token gets its own space, as in llama.cpp
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend


def _merges_by_score(tokens: list[str], types: list[int], scores: list[float], ids: dict[str, int]
                     ) -> list[tuple[str, str]]:
    """Every way to put a normal token together from two others, best score first.

    SentencePiece joins the neighbours whose union scores best; equal scores (files that leave them out) go by id, the
    order in which pieces are learned.
    """
    found = []
    for i, (token, kind) in enumerate(zip(tokens, types)):
        if kind != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], i, left, right))
    return [(tokens[left], tokens[right]) for _, _, left, right in sorted(found)]
