"""Small tokenizers for tests: byte tokens given one by one, and a SentencePiece-like one with byte fallback."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from jradix.tokenizer import Tokenizer, byte_level_text

CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
          "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def make_byte_tokenizer(tokens: Sequence[bytes], *, special: Mapping[str, int] | Sequence[str] = (),
                        added: Sequence[str] = (), bos: str | None = None, eos: str | None = None,
                        add_bos: bool = False, chat_template: str | None = None) -> Tokenizer:
    """A byte-level tokenizer whose token i stands for the bytes tokens[i]; text is encoded with the one-byte tokens.

    Args:
      tokens: different byte strings.
      special: special tokens, with their ids or numbered after `tokens`.
      added: added tokens not flagged special, numbered last.
      bos, eos: names among `special`.
      add_bos: `encode` begins with BOS.
      chat_template: Jinja text.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast
    vocab = {byte_level_text(token): i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(f"tokens={tokens!r}: expected different byte strings")
    numbered = dict(special) if isinstance(special, Mapping) else {t: len(vocab) + i for i, t in enumerate(special)}
    vocab.update(numbered)
    vocab.update({t: max(vocab.values(), default=-1) + 1 + i for i, t in enumerate(added)})
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in numbered])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])
    names = {key: value for key, value in (("bos_token", bos), ("eos_token", eos)) if value is not None}
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, add_bos_token=add_bos, add_eos_token=False, **names)
    return Tokenizer(fast, name="toy", chat_template=chat_template)


def make_chat_tokenizer(**kwargs: object) -> Tokenizer:
    """All 256 bytes (id = byte), ChatML specials 256 to 258 and the plain added token <|tool|> (259)."""
    arguments = dict(special=["<s>", "<|im_start|>", "<|im_end|>"], added=["<|tool|>"], bos="<s>", eos="<|im_end|>",
                     chat_template=CHATML)
    return make_byte_tokenizer([bytes([b]) for b in range(256)], **{**arguments, **kwargs})


def make_sentencepiece_tokenizer(words: Sequence[str] = ()) -> Tokenizer:
    """<unk> 0, <s> 1, </s> 2, bytes 3 to 258, then `words` (a leading space spelled U+2581) and ASCII characters."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words, "\u2581",
             *(chr(c) for c in range(33, 127))]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in names[:3]])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
                                   add_bos_token=True, add_eos_token=False)
    return Tokenizer(fast, name="toy-sentencepiece", chat_template=CHATML)
