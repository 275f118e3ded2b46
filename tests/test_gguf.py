"""GGUF files: header, row order of q and k, quantised types, configs from metadata, and SmolLM2 whole."""
from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

import oracle
from jradix import model_files
from jradix.errors import CheckpointError, UnsupportedModel
from jradix.gguf_header import read_gguf_header
from jradix.models.config import RopeConfig
from jradix.models.decoder import Decoder, split_model
from jradix.models.rope import llama3_divisors
from jradix.weights.gguf import GGUFSource
from jradix.weights.loader import load_config, load_generation_config, load_model, weights_fingerprint
from toy_models import causal_attend, make_checkpoint, toy_config, toy_weights

CPU = jax.devices("cpu")[0]
TOKENS = np.random.default_rng(5).integers(0, 64, 12)
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.": "token_embd.", "model.norm.": "output_norm.", "lm_head.": "output."}
    for ours, theirs in top.items():
        if name.startswith(ours):
            return theirs + name[len(ours):]
    _, _, layer, *middle, last = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(middle)]}.{last}"


def neighbours(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: row i of a head's first half next to row i of its second half."""
    heads = np.split(rows, num_heads)
    return np.concatenate([np.stack(np.split(head, 2), axis=1).reshape(head.shape) for head in heads])


def write_gguf(path: Path, architecture: str, weights: Mapping[str, np.ndarray], config: Mapping[str, Any], *,
               kind: GGMLQuantizationType = GGMLQuantizationType.F32, metadata: Mapping[str, Any] | None = None,
               extra: Mapping[str, np.ndarray] | None = None) -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    writer.add_token_list(["a", "bé", "▁c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    for key, value in (metadata or {}).items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    for name, tensor in weights.items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = neighbours(tensor, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        if tensor.ndim == 2 and kind == GGMLQuantizationType.F16:
            writer.add_tensor(gguf_name(name), tensor.astype(np.float16))
        elif tensor.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), tensor)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def files_of(path: Path) -> model_files.ModelFiles:
    return model_files.resolve(str(path))


def load(path: Path) -> Decoder:
    return load_model(files_of(path), dtype="float32", device=CPU)


def logits(model: Decoder, tokens: np.ndarray = TOKENS) -> np.ndarray:
    return np.asarray(model.logits(model(jnp.asarray(tokens), jnp.arange(len(tokens)), causal_attend(model.config))))


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_gguf_rows_and_logits_equal_the_safetensors(architecture: str, num_kv_heads: int, kind: str,
                                                    tmp_path: Path) -> None:
    """L08"""
    overrides = dict(num_key_value_heads=num_kv_heads, tie_word_embeddings=architecture == "qwen2")
    weights = make_checkpoint(tmp_path, architecture, **overrides)
    write_gguf(tmp_path / "toy.gguf", architecture, weights, toy_config(architecture, **overrides),
               kind=GGMLQuantizationType[kind])
    source = GGUFSource(tmp_path / "toy.gguf")
    assert source.shapes == {name: tensor.shape for name, tensor in weights.items()}
    for name in (f"model.layers.1.self_attn.{n}_proj.weight" for n in "qk"):
        ours, theirs = source.read(name).astype(np.float64), weights[name].astype(np.float64)
        cosine = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
        assert cosine.min() > 0.999
    model = load(tmp_path / "toy.gguf")
    expected = oracle.forward({name: source.read(name) for name in weights}, model.config, TOKENS)
    np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    plain = load_model(files_of(tmp_path), dtype="float32", device=CPU)
    tolerance = {"F16": 0.05, "Q8_0": 0.5}[kind]  # 10 and 7 bits of weight; a wrong row order is off by 5
    np.testing.assert_allclose(logits(model), logits(plain), atol=tolerance)
    # GGUF has no bias flags and names more end tokens; all else is the same config.
    same = ("architecture", "vocab_size", "head_dim", "rms_norm_eps", "rope", "tie_embeddings", "attention_bias",
            "qk_norm", "max_model_len", "layer_windows")
    assert all(getattr(model.config, field) == getattr(plain.config, field) for field in same)


def test_gguf_biases_of_llama_are_put_back_in_order(tmp_path: Path) -> None:
    """L08"""
    overrides = dict(attention_bias=True, mlp_bias=True)
    weights = make_checkpoint(tmp_path, **overrides)
    write_gguf(tmp_path / "toy.gguf", "llama", weights, toy_config(**overrides))
    plain = load_model(files_of(tmp_path), dtype="float32", device=CPU)
    np.testing.assert_allclose(logits(load(tmp_path / "toy.gguf")), logits(plain), atol=1e-5)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_gguf_types_decode_as_the_reference_reader_does(kind: str, tmp_path: Path) -> None:
    from gguf import GGML_QUANT_SIZES
    type_id = GGMLQuantizationType[kind]
    block, num_bytes = GGML_QUANT_SIZES[type_id]
    values = np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32)
    if kind.endswith("_K"):
        raw = np.random.default_rng(0).integers(0, 60, (6, 256 // block * num_bytes), np.uint8)
    else:
        raw = quantize(values, type_id)
    writer = GGUFWriter(tmp_path / "one.gguf", "qwen2")
    writer.add_tensor("other", np.zeros(7, np.float32))
    writer.add_tensor("token_embd.weight", raw, raw_dtype=type_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = GGUFSource(tmp_path / "one.gguf").read("model.embed_tokens.weight")
    tensor = GGUFReader(tmp_path / "one.gguf").tensors[1]
    theirs = dequantize(tensor.data, tensor.tensor_type)
    assert ours.shape == (6, 256)
    np.testing.assert_array_equal(np.asarray(ours, np.float32), theirs.reshape(6, 256))


def test_gguf_header_equals_the_reference_reader(tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", "llama", toy_weights(toy_config()), toy_config())
    ours, theirs = read_gguf_header(tmp_path / "toy.gguf"), GGUFReader(tmp_path / "toy.gguf")
    assert ours.metadata == {key: field.contents() for key, field in theirs.fields.items() if key[:5] != "GGUF."}
    assert [(t.name, t.offset, t.type_id) for t in ours.tensors] == [
        (t.name, t.data_offset, int(t.tensor_type)) for t in theirs.tensors]


def test_gguf_end_tokens_come_from_the_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", "llama", toy_weights(toy_config()), toy_config())
    files = files_of(tmp_path / "toy.gguf")
    assert load_generation_config(files) == {"eos_token_id": [2, 5], "bos_token_id": 1}
    assert load_config(files).eos_token_ids == (2, 5) and load_config(files).bos_token_id == 1


# --- rope in GGUF

def test_gguf_llama3_frequencies_become_llama3_settings(tmp_path: Path) -> None:
    """L06: the tensor rope_freqs.weight states Llama 3's scaling."""
    rope = RopeConfig("llama3", 500000.0, 64, 32.0, 8192, 1.0, 4.0)
    config = toy_config(head_dim=64, rope_theta=500000.0)
    weights = toy_weights(config)
    write_gguf(tmp_path / "toy.gguf", "llama", weights, config,
               extra={"rope_freqs.weight": llama3_divisors(rope).astype(np.float32)})
    assert load_config(files_of(tmp_path / "toy.gguf")).rope == rope
    load(tmp_path / "toy.gguf")
    write_gguf(tmp_path / "odd.gguf", "llama", weights, config,
               extra={"rope_freqs.weight": np.linspace(1, 9, 32, dtype=np.float32)})
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        load_config(files_of(tmp_path / "odd.gguf"))


def test_gguf_yarn_and_linear_settings_are_read(tmp_path: Path) -> None:
    """L06"""
    config = toy_config("qwen2")
    scaling = {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
               "qwen2.rope.scaling.original_context_length": 512}
    write_gguf(tmp_path / "yarn.gguf", "qwen2", toy_weights(config), config, metadata=scaling)
    read = load_config(files_of(tmp_path / "yarn.gguf"))
    assert (read.rope.type, read.rope.factor, read.rope.original_max_len) == ("yarn", 4.0, 512)
    assert read.max_model_len == 2048
    write_gguf(tmp_path / "linear.gguf", "qwen2", toy_weights(config), config,
               metadata={"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 2.0})
    assert load_config(files_of(tmp_path / "linear.gguf")).rope.factor == 2.0


@pytest.mark.parametrize(("metadata", "word"), [
    ({"llama.rope.scaling.type": "longrope"}, "longrope"), ({"llama.expert_count": 8}, "expert_count"),
    ({"llama.rope.dimension_count": 4}, "rope.dimension_count"), ({"split.count": 3}, "split"),
])
def test_gguf_unsupported_settings_are_named(metadata: dict[str, Any], word: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf", "llama", toy_weights(toy_config()), toy_config(), metadata=metadata)
    with pytest.raises(UnsupportedModel, match=word):
        load_config(files_of(tmp_path / "toy.gguf"))


def test_gguf_unknown_architecture_and_tensor_type_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "gemma", toy_weights(toy_config()), toy_config())
    with pytest.raises(UnsupportedModel, match="'gemma'.*llama, qwen2, qwen3"):
        load_config(files_of(tmp_path / "a.gguf"))
    write_gguf(tmp_path / "b.gguf", "llama", toy_weights(toy_config()), toy_config(), kind=GGMLQuantizationType.Q5_0)
    with pytest.raises(UnsupportedModel, match=r"'token_embd\.weight' has type Q5_0; supported: .*Q4_K"):
        load(tmp_path / "b.gguf")


# --- damaged files

@pytest.mark.parametrize("keep", [0, 3, 20, 300, -100])
def test_gguf_truncated_is_a_checkpoint_error(keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L01"""
    path = tmp_path / "toy.gguf"
    write_gguf(path, "llama", toy_weights(toy_config()), toy_config())
    path.write_bytes(path.read_bytes()[:keep])
    monkeypatch.setattr(jax, "device_put", lambda *_: pytest.fail("something was put on the device"))
    with pytest.raises(CheckpointError, match="incomplete download"):
        load(path)


def test_gguf_missing_tensor_is_listed(tmp_path: Path) -> None:
    """L04"""
    weights = toy_weights(toy_config())
    del weights["model.layers.1.mlp.down_proj.weight"]
    write_gguf(tmp_path / "toy.gguf", "llama", weights, toy_config())
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1\.mlp\.down_proj\.weight"):
        load(tmp_path / "toy.gguf")


# --- the demo model

PROMPTS = ([504, 3575, 282, 4649, 314], [1, 4093, 198, 1780, 314], [504, 1122, 9015, 284, 260])
NEXT_TOKENS = [7042, 260, 3598]  # by transformers' own GGUF loading


@pytest.fixture(scope="module")
def smollm2() -> tuple[Decoder, float]:
    # The package itself cannot be imported: installed with --no-deps, it lacks the plugin host it registers with.
    if importlib.util.find_spec(model_files.DEMO_PACKAGE) is None:
        pytest.skip(f"{model_files.DEMO_PACKAGE} is not installed: {model_files.DEMO_INSTALL}")
    start = time.process_time()  # of the processor, which a busy machine does not stretch
    model = load_model(model_files.resolve("demo"), dtype="float32", device=CPU)
    return model, time.process_time() - start


def test_smollm2_loads_in_time_with_every_weight(smollm2: tuple[Decoder, float]) -> None:
    model, seconds = smollm2
    assert seconds < 20
    assert model.config.num_parameters == 134_515_008
    files = model_files.resolve("demo")
    assert load_generation_config(files)["eos_token_id"] == [2] and len(weights_fingerprint(files)) == 32


def next_token_logits(model: Decoder) -> list[np.ndarray]:
    _, leaves, merge = split_model(model)

    @jax.jit
    def run(leaves: list[jax.Array], tokens: jax.Array) -> jax.Array:
        decoder = merge(leaves)
        hidden = decoder(tokens, jnp.arange(len(tokens)), causal_attend(decoder.config))
        return decoder.logits(hidden[-1:])[0]

    return [np.asarray(run(leaves, jnp.asarray(prompt))) for prompt in PROMPTS]


def test_smollm2_next_tokens_equal_those_of_transformers(smollm2: tuple[Decoder, float]) -> None:
    """L08: against stored values, and against transformers itself where torch and accelerate are installed."""
    ours = next_token_logits(smollm2[0])
    assert [int(row.argmax()) for row in ours] == NEXT_TOKENS
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    path = model_files.resolve("demo").path
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for prompt, row in zip(PROMPTS, ours):
        with torch.no_grad():
            expected = theirs.eval()(torch.tensor([prompt])).logits[0, -1].numpy()
        np.testing.assert_allclose(row, expected, atol=2e-3)  # 30 layers in float32, logits up to 30
        assert row.argmax() == expected.argmax()
