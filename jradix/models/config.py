"""ModelConfig: the sizes and settings of a decoder, read from a `transformers` config and checked once.

A setting that changes the model's output and is not implemented is refused here, by name and value.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jradix.config import KVGroup
from jradix.errors import CheckpointError, UnsupportedModel
from jradix.models.registry import find_architecture

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ACTIVATIONS = ("silu", "swish")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, in the words of transformers' `rope_parameters`.

    Attributes:
      type: "default", "linear", "llama3" or "yarn".
      theta: base of the wavelengths.
      dim: rotated dimensions, the whole head.
      factor: how many times longer than the original the context is.
      original_max_len: context length before scaling (llama3, yarn).
      low_freq_factor, high_freq_factor: llama3's band, in original lengths per wavelength.
      beta_fast, beta_slow: yarn's band, in rotations over the original length.
      attention_factor: multiplies cos and sin; None: yarn's formula (1 for the other types).
      mscale, mscale_all_dim: terms of yarn's formula.
      truncate: round yarn's band outwards to whole dimensions.
    """
    type: str = "default"
    theta: float = 10000.0
    dim: int = 64
    factor: float = 1.0
    original_max_len: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def from_hf(cls, parameters: dict[str, Any], *, dim: int, max_position_embeddings: int) -> RopeConfig:
        """Reads `rope_parameters` as transformers normalises them.

        Raises:
          UnsupportedModel: a rope type or setting that is not implemented.
          CheckpointError: a number the type needs is missing or not a number.
        """
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if any(isinstance(value, dict) for value in parameters.values()):
            raise UnsupportedModel(f"rope_parameters differ by layer type ({', '.join(parameters)}); "
                                   f"supported: one setting for all layers")
        if kind not in ROPE_TYPES:
            raise UnsupportedModel(f"rope_type={kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
        if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UnsupportedModel(f"partial_rotary_factor={parameters['partial_rotary_factor']!r} is not supported; "
                                   f"expected 1.0")
        fields: dict[str, Any] = dict(type=kind, dim=dim, theta=_number(parameters, "rope_theta"))
        if kind == "linear":
            fields["factor"] = _number(parameters, "factor")
        if kind in ("llama3", "yarn"):
            fields["original_max_len"] = int(_number(parameters, "original_max_position_embeddings"))
        if kind == "llama3":
            fields |= {name: _number(parameters, name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
        if kind == "yarn":
            fields["factor"] = (max_position_embeddings / fields["original_max_len"]
                                if parameters.get("factor") is None else _number(parameters, "factor"))
            for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
                if parameters.get(name):
                    fields[name] = _number(parameters, name)
            fields["truncate"] = bool(parameters.get("truncate", True))
        return cls(**fields)


@dataclass(frozen=True)
class ModelConfig:
    """What a decoder is built from.

    Attributes:
      architecture: name in `registry.ARCHITECTURES`.
      vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes.
      rms_norm_eps: added to the mean square in every norm.
      tie_embeddings: the head is the embedding.
      attention_bias: q, k and v have a bias.
      attention_out_bias: the attention's output projection has one.
      mlp_bias: gate, up and down have one.
      qk_norm: q and k are normalised per head before the rotation.
      rope: rotary positions.
      layer_windows: per layer, the number of latest tokens (the token itself included) it attends to; None: all.
      max_model_len: longest sequence the checkpoint states. For linear and yarn that is the original length times the
        factor (`original_max_position_embeddings`, else `max_position_embeddings`), and never less than
        `max_position_embeddings`; llama3 and default state it in `max_position_embeddings` itself.
      eos_token_ids: tokens that end an output, from the model's config (generation_config.json may name more).
      bos_token_id: token that begins a text, or None.
    """
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @classmethod
    def from_hf(cls, hf_config: Any) -> ModelConfig:
        """Reads a `transformers.PretrainedConfig` (family defaults filled in by transformers).

        Raises:
          UnsupportedModel: the architecture or a setting is not implemented; the message names it and its value.
          CheckpointError: sizes that contradict each other.
        """
        architecture = find_architecture(hf_config.architectures, hf_config.model_type)
        _refuse_unsupported(hf_config)
        num_heads, num_kv_heads = hf_config.num_attention_heads, hf_config.num_key_value_heads
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads
        if num_heads % num_kv_heads:
            raise CheckpointError(f"num_attention_heads={num_heads} is not a multiple of "
                                  f"num_key_value_heads={num_kv_heads}; is config.json damaged?")
        if head_dim % 2:
            raise UnsupportedModel(f"head_dim={head_dim} is odd; rotary positions need an even one")
        longest = hf_config.max_position_embeddings
        rope = RopeConfig.from_hf(hf_config.rope_parameters or {}, dim=head_dim, max_position_embeddings=longest)
        if rope.type in ("linear", "yarn"):
            original = (hf_config.rope_parameters or {}).get("original_max_position_embeddings") or longest
            longest = max(longest, int(original * rope.factor))
        eos = hf_config.eos_token_id
        bos = hf_config.bos_token_id
        return cls(
            architecture=architecture.name, vocab_size=hf_config.vocab_size, hidden_size=hf_config.hidden_size,
            intermediate_size=hf_config.intermediate_size, num_layers=hf_config.num_hidden_layers, num_heads=num_heads,
            num_kv_heads=num_kv_heads, head_dim=head_dim, rms_norm_eps=float(hf_config.rms_norm_eps),
            tie_embeddings=bool(hf_config.tie_word_embeddings), rope=rope, max_model_len=longest,
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            bos_token_id=bos if isinstance(bos, int) else None, **architecture.read(hf_config))

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Layers by page pool: one group of all. Its window is None unless every layer has the same one, because pages
        may only be dropped once no layer reads them; each layer still masks by its own `layer_windows`."""
        shared = set(self.layer_windows)
        return (KVGroup(tuple(range(self.num_layers)), shared.pop() if len(shared) == 1 else None),)

    @property
    def kv_width(self) -> int:
        """Numbers per token in one layer's keys (or values)."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        """Columns of the fused q, k, v projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied head counted once."""
        h, i, q = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        layer = h * self.qkv_width + q * h + 3 * h * i + 2 * h
        layer += self.attention_bias * self.qkv_width + self.attention_out_bias * h + self.mlp_bias * (2 * i + h)
        layer += self.qk_norm * 2 * self.head_dim
        return self.num_layers * layer + h + self.vocab_size * h * (1 if self.tie_embeddings else 2)


def _refuse_unsupported(hf: Any) -> None:
    if hf.hidden_act not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act={hf.hidden_act!r} is not supported; supported: 'silu'")
    quantization = getattr(hf, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModel(f"quantization_config (quant_method={method!r}) is not supported; use the unquantised "
                               f"checkpoint, or a GGUF file")
    if getattr(hf, "is_causal", True) is False:
        raise UnsupportedModel("is_causal=False is not supported: the model is an encoder, not a text generator")
    if getattr(hf, "is_encoder_decoder", False):
        raise UnsupportedModel("is_encoder_decoder=True is not supported; expected a decoder-only model")


def _number(parameters: dict[str, Any], name: str) -> float:
    value = parameters.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"rope_parameters {name}={value!r}: expected a positive number "
                              f"(given: {parameters!r})")
    return value
