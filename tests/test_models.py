"""The decoder against transformers and a float64 oracle; configs, rope, number types."""
from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import oracle
from jradix import model_files
from jradix.config import KVGroup
from jradix.errors import CheckpointError, DeviceError, UnsupportedModel
from jradix.models.config import ModelConfig, RopeConfig
from jradix.models.decoder import Decoder, abstract_parameters, named_parameters, split_model
from jradix.models.rope import inverse_frequencies, rope_cos_sin
from jradix.ops.matmul_native import why_not
from jradix.weights import dtype as dtypes
from jradix.weights.loader import load_config, load_model
from toy_models import FAMILIES, REFERENCE_MODELS, causal_attend, make_checkpoint, reference_tokens, toy_config

CPU = jax.devices("cpu")[0]
REFERENCES = Path(__file__).parent / "data" / "tiny_references.npz"
FLOAT32_TOLERANCE = 1e-4  # logits of about 5, sums of 32 to 64 float32 products over 2 layers; 1e-5 is seen


def load(folder: Path, dtype: str = "float32") -> Decoder:
    return load_model(model_files.resolve(str(folder)), dtype=dtype, device=CPU)


def run(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    _, leaves, merge = split_model(model)

    @jax.jit
    def logits(leaves: list[jax.Array], tokens: jax.Array) -> jax.Array:
        decoder = merge(leaves)
        return decoder.logits(decoder(tokens, jnp.arange(len(tokens)), causal_attend(decoder.config)))

    return np.asarray(logits(leaves, tokens))


def config_of(folder: Path, architecture: str = "llama", **overrides: Any) -> ModelConfig:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(toy_config(architecture, **overrides)))
    return load_config(model_files.ModelFiles("huggingface", folder, "toy"))


@pytest.mark.parametrize("name", REFERENCE_MODELS)
def test_logits_of_each_architecture_match_oracle_and_transformers(name: str, tmp_path: Path) -> None:
    """L05, L06: explicit head_dim; rope scaling past the original length."""
    architecture, overrides = REFERENCE_MODELS[name]
    weights = make_checkpoint(tmp_path, architecture, **overrides)
    model = load(tmp_path)
    ours = run(model, reference_tokens())
    np.testing.assert_allclose(ours, oracle.forward(weights, model.config, reference_tokens()), atol=FLOAT32_TOLERANCE)
    theirs = np.load(REFERENCES)[name]
    np.testing.assert_allclose(ours[::4], theirs, atol=FLOAT32_TOLERANCE)
    assert (ours[::4].argmax(-1) == theirs.argmax(-1)).all()


def test_stored_references_match_the_installed_transformers() -> None:
    """The file on disk is what data/make_references.py writes today, for one model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(folder, "qwen3")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                                  attn_implementation="eager")
        with torch.no_grad():
            logits = model.eval()(torch.tensor(reference_tokens())[None]).logits[0].numpy()
    np.testing.assert_allclose(logits[::4], np.load(REFERENCES)["qwen3"], atol=1e-5)


def test_bfloat16_weights_one_row_equals_that_row_of_many(tmp_path: Path) -> None:
    """The doubled row of a one-row 16-bit product is the row a larger product gives."""
    make_checkpoint(tmp_path)
    model = load(tmp_path, "bfloat16")
    x = jax.random.normal(jax.random.key(0), (4, model.config.hidden_size))
    alone, among = jax.jit(model.logits)(x[:1]), jax.jit(model.logits)(x)
    assert alone.shape == (1, model.config.vocab_size) and alone.dtype == jnp.float32
    np.testing.assert_allclose(alone[0], among[0], atol=1e-5)


def test_head_dim_explicit_and_absent_sizes_follow(tmp_path: Path) -> None:
    """L05"""
    sizes = dict(hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    stated, derived = config_of(tmp_path / "a", head_dim=24, **sizes), config_of(tmp_path / "b", **sizes)
    assert (stated.head_dim, stated.kv_width, stated.rope.dim) == (24, 24, 24)
    assert (derived.head_dim, derived.kv_width, derived.rope.dim) == (16, 16, 16)
    assert abstract_parameters(stated, jnp.float32)["layers.0.attention.qkv.kernel"].shape == (96, 32)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_num_parameters_counts_every_leaf(architecture: str, tmp_path: Path) -> None:
    for tie in (True, False):
        config = config_of(tmp_path, architecture, tie_word_embeddings=tie)
        shapes = abstract_parameters(config, jnp.bfloat16).values()
        assert config.num_parameters == sum(shape.size for shape in shapes)


def test_random_decoder_runs_and_norms_stay_float32() -> None:
    config = ModelConfig("LlamaForCausalLM", 16, 8, 16, 1, 2, 1, 4, 1e-5, True, False, False, False, False,
                         RopeConfig(dim=4), (None,), 64)
    model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    kinds = {path: array.dtype for path, array in named_parameters(model).items()}
    assert kinds["norm.scale"] == jnp.float32 and kinds["layers.0.mlp.down.kernel"] == jnp.bfloat16
    assert np.isfinite(run(model, np.arange(5))).all()


# --- windows and groups

def test_windows_mistral_and_qwen_per_layer(tmp_path: Path) -> None:
    full = config_of(tmp_path / "a", "mistral")
    assert full.layer_windows == (None, None) and full.kv_groups() == (KVGroup((0, 1), None),)
    all_windows = config_of(tmp_path / "b", "mistral", sliding_window=8)
    assert all_windows.layer_windows == (8, 8) and all_windows.kv_groups() == (KVGroup((0, 1), 8),)
    mixed = config_of(tmp_path / "c", "qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert mixed.layer_windows == (None, 8) and mixed.kv_groups() == (KVGroup((0, 1), None),)
    off = config_of(tmp_path / "d", "qwen3", use_sliding_window=False, sliding_window=8)
    assert off.layer_windows == (None, None)


# --- rope

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": dict(factor=4.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
    "yarn": dict(factor=4.0, original_max_position_embeddings=4096),
}
THETA = 500000.0


def spelled(kind: str, spelling: int) -> dict[str, Any]:
    """The same rope numbers under rope_scaling or rope_parameters, with "type" or "rope_type"."""
    numbers = {("type", "rope_type")[spelling % 2]: kind, **ROPES[kind]}
    if spelling < 2:
        return dict(rope_theta=THETA, rope_scaling=numbers)
    return dict(rope_theta=None, rope_parameters=dict(numbers, rope_theta=THETA))


@pytest.mark.parametrize("kind", ROPES)
def test_rope_spelled_four_ways_gives_the_same_frequencies(kind: str, tmp_path: Path) -> None:
    """L06"""
    sizes = dict(head_dim=64, max_position_embeddings=16384)
    ropes = [config_of(tmp_path / str(i), **sizes, **spelled(kind, i)).rope for i in range(4)]
    assert len(set(ropes)) == 1 and ropes[0].type == kind and ropes[0].theta == THETA
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path / "0"))
    ours, scale = inverse_frequencies(ropes[0])
    np.testing.assert_allclose(ours, theirs.inv_freq.numpy(), rtol=1e-6)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-6)
    positions = np.arange(0, 4 * 4096, 97)
    cos, sin = theirs(torch.zeros(1, 1, 64), torch.tensor(positions)[None])
    ours_cos, ours_sin = jax.jit(lambda p: rope_cos_sin(p, ropes[0]))(positions.astype(np.int32))
    # A frequency off by one float32 step turns position 16,384 by 1e-3 radians.
    np.testing.assert_allclose(ours_cos, cos[0].numpy(), atol=2e-3)
    np.testing.assert_allclose(ours_sin, sin[0].numpy(), atol=2e-3)


def test_max_model_len_follows_the_rope_factor(tmp_path: Path) -> None:
    """L06"""
    def longest(i: int, **overrides: Any) -> int:
        return config_of(tmp_path / str(i), **overrides).max_model_len

    assert longest(0, max_position_embeddings=4096) == 4096
    assert longest(1, max_position_embeddings=4096, rope_scaling={"type": "linear", "factor": 4.0}) == 16384
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert longest(2, max_position_embeddings=4096, rope_scaling=yarn) == 16384
    assert longest(3, max_position_embeddings=16384, rope_scaling=yarn) == 16384
    llama3 = dict(ROPES["llama3"], rope_type="llama3")
    assert longest(4, max_position_embeddings=131072, rope_scaling=llama3) == 131072


@pytest.mark.parametrize(("overrides", "words"), [
    (dict(rope_scaling={"rope_type": "foo", "factor": 2.0}), ("rope_type", "'foo'", "yarn")),
    (dict(rope_scaling={"type": "dynamic", "factor": 2.0}), ("rope_type", "'dynamic'")),
    (dict(rope_scaling={"type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
                        "original_max_position_embeddings": 64}), ("rope_type", "'longrope'")),
    (dict(hidden_act="gelu"), ("hidden_act", "'gelu'", "silu")),
    (dict(quantization_config={"quant_method": "gptq", "bits": 4}), ("quantization_config", "gptq")),
    (dict(partial_rotary_factor=0.5), ("partial_rotary_factor", "0.5")),
    (dict(is_causal=False), ("is_causal",)),
    (dict(architectures=["FooForCausalLM"]), ("FooForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")),
    (dict(architectures=None, model_type="foo"), ("'foo'", "MistralForCausalLM")),
])
def test_unsupported_setting_is_refused_by_name_and_value(overrides: dict, words: tuple, tmp_path: Path) -> None:
    """L06: an unknown rope type is refused; so is every other setting that is not implemented."""
    with pytest.raises(UnsupportedModel) as caught:
        config_of(tmp_path, **overrides)
    assert all(word in str(caught.value) for word in words), caught.value


def test_unsupported_layer_types_and_missing_rope_number_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="chunked_attention"):
        config_of(tmp_path / "a", "qwen3", layer_types=["full_attention", "chunked_attention"])
    with pytest.raises(CheckpointError, match="factor"):
        config_of(tmp_path / "b", rope_scaling={"rope_type": "linear"})


def test_architectures_absent_model_type_decides(tmp_path: Path) -> None:
    assert config_of(tmp_path, "qwen3", architectures=None).architecture == "Qwen3ForCausalLM"


def test_eos_token_ids_list_number_and_none(tmp_path: Path) -> None:
    assert config_of(tmp_path / "a", eos_token_id=[2, 5]).eos_token_ids == (2, 5)
    assert config_of(tmp_path / "b", eos_token_id=7).eos_token_ids == (7,)
    assert config_of(tmp_path / "c", "qwen2", eos_token_id=None).eos_token_ids == ()


# --- number types

def dots_of(jaxpr: Any) -> list[Any]:
    """The products of a program, those inside its branches and calls included."""
    found = []
    for eqn in jaxpr.eqns:
        found += [eqn] if eqn.primitive.name == "dot_general" else []
        for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(param, "jaxpr", param)
            found += dots_of(inner) if hasattr(inner, "eqns") else []
    return found


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("num_rows", [1, 3, 100])
def test_float32_products_ask_for_highest_precision_and_leave_global_config(num_rows: int, tmp_path: Path) -> None:
    """N10"""
    make_checkpoint(tmp_path, tie_word_embeddings=False)
    before = jax.config.jax_default_matmul_precision
    model = load(tmp_path)

    def step(tokens: jax.Array) -> jax.Array:
        return model.logits(model(tokens, jnp.arange(num_rows), lambda layer, q, k, v: q))

    dots = dots_of(jax.make_jaxpr(step)(jnp.arange(num_rows)).jaxpr)
    num_forms = 2 if num_rows == 1 else 1      # the branch for CPUs has a product of XLA's with one row alone
    assert len(dots) == num_forms * (4 * model.config.num_layers + 1)
    for dot in dots:
        assert set(dot.params["precision"]) == {jax.lax.Precision.HIGHEST}
    assert jax.config.jax_default_matmul_precision == before


def fake_device(capability: str | None, platform: str = "gpu") -> Any:
    device = SimpleNamespace(platform=platform, device_kind="Tesla T4")
    if capability is not None:
        device.compute_capability = capability
    return device


def test_dtype_gpu_without_bfloat16_auto_takes_float16_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """B07"""
    with caplog.at_level(logging.WARNING, "jradix"):
        chosen, reason = dtypes.resolve_dtype("auto", fake_device("7.5"), hidden=8, intermediate=8)
    assert chosen == jnp.float16 and "7.5" in reason
    assert len(caplog.records) == 1 and "float16" in caplog.text


def test_dtype_explicit_bfloat16_without_it_names_the_alternative() -> None:
    """B07"""
    with pytest.raises(DeviceError, match="float16"):
        dtypes.resolve_dtype("bfloat16", fake_device("7.5"), hidden=8, intermediate=8)


@pytest.mark.parametrize(("device", "expected"), [
    (fake_device("8.0"), jnp.bfloat16), (fake_device("9.0"), jnp.bfloat16), (fake_device("12.0"), jnp.bfloat16),
    (fake_device(None, "tpu"), jnp.bfloat16),
])
def test_dtype_auto_on_accelerators_with_bfloat16_takes_it(device: Any, expected: Any) -> None:
    assert dtypes.resolve_dtype("auto", device, hidden=8, intermediate=8)[0] == expected


@pytest.mark.parametrize(("narrow_s", "expected"), [(0.95, jnp.float32), (0.5, jnp.bfloat16), (2.0, jnp.float32)])
def test_dtype_auto_on_cpu_takes_bfloat16_only_when_clearly_faster(narrow_s: float, expected: Any,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "_measure", lambda dtype, *sizes: 1.0 if dtype == jnp.float32 else narrow_s)
    assert dtypes.resolve_dtype("auto", CPU, hidden=8, intermediate=8)[0] == expected


def test_dtype_auto_on_cpu_measures_and_says_so() -> None:
    chosen, reason = dtypes.resolve_dtype("auto", CPU, hidden=64, intermediate=128)
    assert chosen in (jnp.float32, jnp.bfloat16) and "ms" in reason


def test_dtype_unknown_name_lists_the_known() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        dtypes.resolve_dtype("fp8", CPU, hidden=8, intermediate=8)


@pytest.mark.parametrize("reason", [None, "no C compiler"])
def test_kv_dtype_bfloat16_on_a_cpu_needs_a_write_in_place(reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes.memory_native, "why_not", lambda dtype: reason)
    is_rewritten = reason is not None and jax.__version_info__ < (0, 11, 2)
    assert dtypes.kv_dtype(jnp.dtype(jnp.bfloat16), CPU) == (jnp.float32 if is_rewritten else jnp.bfloat16)
    assert dtypes.kv_dtype(jnp.dtype(jnp.float16), CPU) == jnp.float16
    assert dtypes.kv_dtype(jnp.dtype(jnp.bfloat16), fake_device("9.0")) == jnp.bfloat16
