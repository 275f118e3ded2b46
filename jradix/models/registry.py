"""Which architectures are supported and what is particular to each one's config.

A new architecture of this shape (pre-norm decoder, rotary positions, SwiGLU) is one row of `ARCHITECTURES`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jradix.errors import UnsupportedModel


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
      name: class name in `architectures` of config.json.
      model_type: `model_type` of config.json, used where `architectures` is absent.
      read: the config's family-specific settings -> fields of ModelConfig.
    """
    name: str
    model_type: str
    read: Callable[[Any], dict[str, Any]]


def _read_llama(hf: Any) -> dict[str, Any]:
    bias = bool(hf.attention_bias)
    return dict(attention_bias=bias, attention_out_bias=bias, mlp_bias=bool(hf.mlp_bias), qk_norm=False,
                layer_windows=(None,) * hf.num_hidden_layers)


def _read_mistral(hf: Any) -> dict[str, Any]:
    if len(set(getattr(hf, "layer_types", None) or ())) > 1:
        raise UnsupportedModel(f"MistralForCausalLM with layer_types={hf.layer_types!r}: only one attention type for "
                               f"all layers is supported for this architecture")
    return dict(attention_bias=False, attention_out_bias=False, mlp_bias=False, qk_norm=False,
                layer_windows=(hf.sliding_window,) * hf.num_hidden_layers)


def _read_qwen2(hf: Any) -> dict[str, Any]:
    return dict(attention_bias=True, attention_out_bias=False, mlp_bias=False, qk_norm=False,
                layer_windows=_windows(hf))


def _read_qwen3(hf: Any) -> dict[str, Any]:
    bias = bool(hf.attention_bias)
    return dict(attention_bias=bias, attention_out_bias=bias, mlp_bias=False, qk_norm=True, layer_windows=_windows(hf))


def _windows(hf: Any) -> tuple[int | None, ...]:
    """Window of each layer; transformers has filled `layer_types` from use_sliding_window and max_window_layers."""
    unknown = sorted(set(hf.layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(f"layer_types contains {unknown[0]!r}; supported: 'full_attention', 'sliding_attention'")
    if len(hf.layer_types) != hf.num_hidden_layers:
        raise UnsupportedModel(f"layer_types has {len(hf.layer_types)} entries; expected one per layer, "
                               f"num_hidden_layers={hf.num_hidden_layers}")
    return tuple(hf.sliding_window if kind == "sliding_attention" else None for kind in hf.layer_types)


ARCHITECTURES: Mapping[str, Architecture] = {row.name: row for row in (
    Architecture("LlamaForCausalLM", "llama", _read_llama),  # Llama 2 and 3, SmolLM2
    Architecture("MistralForCausalLM", "mistral", _read_mistral),
    Architecture("Qwen2ForCausalLM", "qwen2", _read_qwen2),  # Qwen2 and Qwen2.5
    Architecture("Qwen3ForCausalLM", "qwen3", _read_qwen3),
)}


def find_architecture(names: list[str] | None, model_type: str | None) -> Architecture:
    """The row for `architectures` of config.json, or for `model_type` where that list is empty.

    Raises:
      UnsupportedModel: it is not in the table; the message lists what is.
    """
    for name in names or ():
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names:
        for row in ARCHITECTURES.values():
            if row.model_type == model_type:
                return row
    given = ", ".join(names) if names else f"model_type={model_type!r}"
    raise UnsupportedModel(f"architecture {given} is not supported; supported: {', '.join(ARCHITECTURES)}")
