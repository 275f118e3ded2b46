"""Converted checkpoints: written, restored in the same bits, sharded, and refused when damaged."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jradix import model_files
from jradix.errors import CheckpointError
from jradix.models.decoder import named_parameters
from jradix.weights.loader import load_config, load_generation_config, load_model, weights_fingerprint
from jradix.weights.orbax import restore_orbax, save_orbax
from toy_models import make_checkpoint

CPU = jax.devices("cpu")[0]
HERE = SingleDeviceSharding(CPU)
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A safetensors folder and the Orbax folder made from it."""
    root = tmp_path_factory.mktemp("orbax")
    make_checkpoint(root / "source", "qwen3", tie_word_embeddings=False)
    (root / "source" / "generation_config.json").write_text('{"temperature": 0.5}')
    files = model_files.resolve(str(root / "source"))
    model = load_model(files, dtype="float32", device=CPU)
    save_orbax(model, model.config, files, root / "converted")
    return root / "source", root / "converted"


def test_orbax_round_trip_keeps_bits_and_configs(converted: tuple[Path, Path]) -> None:
    source, target = (model_files.resolve(str(folder)) for folder in converted)
    assert target.kind == "orbax" and load_config(target) == load_config(source)
    assert load_generation_config(target) == {"temperature": 0.5}
    calls: list[tuple[int, int]] = []
    restored = load_model(target, dtype="float32", device=CPU, progress=lambda *call: calls.append(call))
    before, after = named_parameters(load_model(source, dtype="float32", device=CPU)), named_parameters(restored)
    assert before.keys() == after.keys() and all((before[path] == after[path]).all() for path in before)
    assert calls == [(calls[0][1], calls[0][1])]
    marker = json.loads((target.path / "jradix.json").read_text())
    assert marker["num_parameters"] == restored.config.num_parameters and marker["dtype"] == "float32"
    assert weights_fingerprint(target) != weights_fingerprint(source)


def test_orbax_restores_into_another_type(converted: tuple[Path, Path]) -> None:
    files = model_files.resolve(str(converted[1]))
    wide = named_parameters(restore_orbax(files, "float32", HERE))
    narrow = named_parameters(restore_orbax(files, "bfloat16", HERE))
    assert (narrow["head"] == wide["head"].astype(jnp.bfloat16)).all() and narrow["norm.scale"].dtype == jnp.float32


def test_orbax_existing_folder_is_not_overwritten(converted: tuple[Path, Path]) -> None:
    files = model_files.resolve(str(converted[0]))
    model = load_model(files, dtype="float32", device=CPU)
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        save_orbax(model, model.config, files, converted[1])


def damaged_copy(converted: tuple[Path, Path], folder: Path) -> model_files.ModelFiles:
    shutil.copytree(converted[1], folder)
    return model_files.resolve(str(folder))


@pytest.mark.parametrize("damage", ["remove", "truncate"])
def test_orbax_data_file_missing_or_cut_is_named(damage: str, converted: tuple[Path, Path], tmp_path: Path) -> None:
    files = damaged_copy(converted, tmp_path / "copy")
    victim = max((files.path / "weights").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    if damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=victim.name):
        restore_orbax(files, "float32", HERE)


def test_orbax_other_shapes_than_the_config_are_named(converted: tuple[Path, Path], tmp_path: Path) -> None:
    files = damaged_copy(converted, tmp_path / "copy")
    config = json.loads((files.path / "config.json").read_text())
    (files.path / "config.json").write_text(json.dumps(dict(config, vocab_size=65)))
    with pytest.raises(CheckpointError, match=r"\(64, 32\), config.json needs \(65, 32\)"):
        restore_orbax(files, "float32", HERE)
    (files.path / "config.json").write_text(json.dumps(dict(config, num_hidden_layers=3)))
    with pytest.raises(CheckpointError, match=r"missing parameters: \['layers\.2"):
        restore_orbax(files, "float32", HERE)


def test_orbax_marker_of_another_format_is_refused(converted: tuple[Path, Path], tmp_path: Path) -> None:
    files = damaged_copy(converted, tmp_path / "copy")
    marker = json.loads((files.path / "jradix.json").read_text())
    (files.path / "jradix.json").write_text(json.dumps(dict(marker, format=99)))
    with pytest.raises(CheckpointError, match="format 99"):
        restore_orbax(files, "float32", HERE)


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jradix.model_files import resolve
from jradix.models.decoder import named_parameters
from jradix.weights.orbax import restore_orbax
mesh = Mesh(np.array(jax.devices()), ("model",))
spread = lambda path, shape: NamedSharding(mesh, PartitionSpec(*(None,) * (len(shape) - 1), "model"))
files = resolve(sys.argv[1])
one = named_parameters(restore_orbax(files, "float32", jax.sharding.SingleDeviceSharding(jax.devices()[0])))
two = named_parameters(restore_orbax(files, "float32", spread))
for path, array in two.items():
    assert len(array.sharding.device_set) == 2 and array.addressable_shards[0].data.size * 2 == array.size, path
    assert (np.asarray(array) == np.asarray(one[path])).all(), path
print("sharded", len(two))
"""


def test_orbax_restores_sharded_over_two_devices(converted: tuple[Path, Path]) -> None:
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu",
                       PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", SHARDED, str(converted[1])], env=environment, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0 and "sharded" in done.stdout, done.stderr[-2000:]
