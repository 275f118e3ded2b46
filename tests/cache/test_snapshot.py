"""Saving and loading the cache, the host side: tree arrays, the folder and its manifest, what is refused."""
from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jradix.cache import snapshot as snapshot_module
from jradix.cache.node import Namespace, Tier
from jradix.cache.packed_tree import PackedTree, Unpacked, pack, unpack
from jradix.cache.prefix_cache import PrefixCache
from jradix.cache.snapshot import SnapshotIdentity, new_snapshot, open_snapshot
from jradix.errors import SnapshotError

PAGE = 4
IDENTITY = SnapshotIdentity("w1", "c1", "t1", "float32", "float32", PAGE, 2, 1, 8, ((0, 1),))
A, B = Namespace("m"), Namespace("m", 0, "adapter", ("tenant", 7))


class FakeKV:
    """A cache whose pages have content: in each place the tokens that led there, on which real KV depends."""

    def __init__(self, num_pages: int = 128, *, num_host_pages: int = 0, num_groups: int = 1, policy: str = "lru"):
        self.now = 1000.0
        self.cache = PrefixCache.create(page_size=PAGE, num_pages=num_pages, max_pages=32, num_groups=num_groups,
                                        num_host_pages=num_host_pages, eviction_policy=policy, clock=lambda: self.now)
        self.device: list[dict[int, list]] = [{} for _ in range(num_groups)]
        self.host: list[dict[int, list]] = [{} for _ in range(num_groups)]

    def run(self, tokens: list[int], namespace: Namespace = A) -> int:
        """One request without output: what it finds is checked, the rest written. Returns the tokens found."""
        self.now += 1.0
        lease = self.cache.acquire(np.array(tokens, np.int32), namespace)
        self.cache.extend(lease, len(tokens))
        self.move()
        for pages, row in zip(self.device, lease.page_table.tolist()):
            for i in range(len(tokens)):
                place = pages.setdefault(row[i // PAGE], [None] * PAGE)
                content = (namespace, *tokens[:i + 1])
                if i < lease.num_cached_tokens:
                    assert place[i % PAGE] == content, "wrong content found in the cache"
                place[i % PAGE] = content
        self.cache.release(lease, np.array(tokens, np.int32))
        return lease.num_cached_tokens

    def move(self) -> None:
        for kind, source, target in self.cache.take_moves():
            frm, to = {"COPY": (self.device, self.device), "OUT": (self.device, self.host),
                       "IN": (self.host, self.device)}[kind.name]
            for group, (sources, targets) in enumerate(zip(source.tolist(), target.tolist())):
                for one, other in zip(sources, targets):
                    to[group][other] = list(frm[group][one])

    def pack(self) -> tuple[PackedTree, list[list[list]]]:
        """The packed tree and the content of its rows, by group."""
        packed, device, host = pack(self.cache)
        return packed, [[self.device[g][p] for p in device[g].tolist()] + [self.host[g][p] for p in host[g].tolist()]
                        for g in range(len(self.device))]

    def unpack(self, packed: PackedTree, content: list[list[list]]) -> Unpacked:
        def fill(rows: np.ndarray, pages: np.ndarray) -> None:
            for group, ids in enumerate(pages):
                new = {page: list(content[group][row]) for row, page in zip(rows.tolist(), ids.tolist())}
                self.device[group] |= new
        done = unpack(self.cache, packed, fill)
        self.cache.check_invariants()
        return done

    def found(self, tokens: list[int], namespace: Namespace = A) -> int:
        return self.cache.num_matching_tokens(np.array([*tokens, -1], np.int32), namespace)

    def eviction_order(self) -> list[tuple[int, ...]]:
        """Paths in the order in which their last page goes when all are evicted, one page at a time."""
        tree, order = self.cache.tree, []
        while tree.num_evictable_pages:
            before = {node: node.num_pages for node in tree.nodes() if node.tier is Tier.DEVICE}
            paths = {node: tuple(tree.tokens_of(node).tolist()) for node in before}
            for pool, ids in zip(self.cache.pools, tree.evict(1)):
                pool.free(ids)
            gone = [node for node, n in before.items() if node.tier is not Tier.DEVICE or node.num_pages < n
                    or node.parent is None]
            order += [paths[node] for node in gone]
        return order


def filled(seed: int, **kwargs: object) -> FakeKV:
    """A cache after 40 prompts that share beginnings of any length."""
    random = np.random.default_rng(seed)
    kv = FakeKV(**kwargs)
    prompts: list[list[int]] = [[1]]
    for _ in range(40):
        old = prompts[random.integers(len(prompts))]
        prompt = old[:random.integers(len(old) + 1)] + random.integers(1, 4, random.integers(1, 14)).tolist()
        prompts.append(prompt[:60])
        kv.run(prompts[-1], (A, B)[random.integers(2)])
    kv.cache.check_invariants()
    return kv


def uses(kv: FakeKV) -> dict[tuple, tuple]:
    """Path -> what is known of it."""
    tree = kv.cache.tree
    return {(tree.namespace_of(node), tuple(tree.tokens_of(node).tolist())): (
        node.hits, round(kv.now - node.used_s, 6), round(kv.now - node.created_s, 6), node.num_pages)
        for node in tree.nodes()}


# -- the tree as arrays

@pytest.mark.parametrize("seed", range(4))
def test_unpack_into_an_empty_cache_restores_paths_hits_ages_and_order(seed: int) -> None:
    old, new = filled(seed), FakeKV()
    new.now = 5.0
    packed, content = old.pack()
    done = new.unpack(packed, content)
    assert uses(new) == uses(old) and done == Unpacked(packed.num_rows, 0, 0)
    assert set(new.cache.tree.roots) == set(old.cache.tree.roots)
    assert new.eviction_order() == old.eviction_order()


@pytest.mark.parametrize("policy", ["lfu", "slru"])
def test_unpack_under_another_policy_keeps_its_invariants(policy: str) -> None:
    old, new = filled(7, policy=policy), FakeKV(policy=policy)
    new.unpack(*old.pack())
    assert uses(new) == uses(old)
    assert len(new.eviction_order()) == len(old.eviction_order())


def test_unpack_then_run_finds_the_same_content() -> None:
    """Tails, whole pages and partial pages: every token that is found has the content it had."""
    old, new = filled(3, num_groups=2), FakeKV(num_groups=2)
    new.unpack(*old.pack())
    paths = list(uses(old))
    for namespace, path in paths:
        assert new.found([*path, 9, 9], namespace) == len(path)
    for namespace, path in paths:
        new.run([*path, 9, 9], namespace)


def test_pack_takes_host_pages_and_leaves_out_what_is_gone() -> None:
    kv = FakeKV(num_pages=8, num_host_pages=4)
    for first in range(1, 7):
        kv.run([first] * 8)                      # two pages each: 8 on the device, 4 on the host
    kv.run([7] * 8)
    packed, content = kv.pack()
    assert packed.num_rows == 12 and kv.cache.tree.num_gone_pages > 0
    new = FakeKV()
    new.unpack(packed, content)
    assert [new.found([first] * 8) for first in range(1, 8)] == [0] + [8] * 6
    assert {node.tier for node in new.cache.tree.nodes()} == {Tier.DEVICE}
    new.run([2] * 8 + [1])


def test_unpack_into_a_smaller_pool_takes_the_most_recently_used_and_counts_the_rest() -> None:
    old = FakeKV()
    for first in range(1, 6):
        old.run([first] * 12)
    old.run([1] * 12 + [2] * 8)
    old.run([3] * 12)
    new = FakeKV(num_pages=10)
    done = new.unpack(*old.pack())
    assert done == Unpacked(10, 0, 7)
    assert new.found([3] * 12) == 12 and new.found([1] * 12 + [2] * 8) == 20      # 3 + 5 pages, the last uses
    assert new.found([5] * 12) == 8 and new.found([4] * 12) == 0                  # two more pages of the next one


def test_unpack_tail_that_no_longer_fits_is_left_out() -> None:
    old = FakeKV()
    old.run([1] * 4)
    old.run([2] * 7)
    new = FakeKV(num_pages=1)
    assert new.unpack(*old.pack()) == Unpacked(1, 0, 2)
    assert new.found([2] * 7) == 4


@pytest.mark.parametrize("seed", range(10))
def test_unpack_into_a_cache_in_use_adds_what_it_lacks(seed: int) -> None:
    random = np.random.default_rng(seed)
    host_pages, num_pages = int(random.integers(0, 2)) * 8, int(random.integers(12, 100))
    old, new = filled(seed), filled(seed + 1 + (seed % 2) * 100, num_pages=num_pages, num_host_pages=host_pages)
    packed, content = old.pack()
    before = {key: new.found(list(key[1]), key[0]) for key in {**uses(new), **uses(old)}}
    num_free = new.cache.num_free_pages
    done, paths = new.unpack(packed, content), uses(old)
    assert done.num_loaded_pages <= num_free
    assert done.num_loaded_pages + done.num_existing_pages + done.num_left_out_pages == packed.num_rows
    for key, n in before.items():
        now = new.found(list(key[1]), key[0])
        assert now >= n, "loading lost something"
        if done.num_left_out_pages == 0 and key in paths:
            assert now == len(key[1])
    for namespace, path in before:
        new.run([*path, 9], namespace)
    new.cache.check_invariants()
    again = new.unpack(packed, content)
    assert again.num_left_out_pages == 0 or new.cache.num_free_pages == 0


def test_unpack_twice_loads_nothing_the_second_time() -> None:
    old, new = filled(5), FakeKV()
    packed, content = old.pack()
    new.unpack(packed, content)
    assert new.unpack(packed, content) == Unpacked(0, packed.num_rows, 0)
    assert uses(new).keys() == uses(old).keys()


def test_unpack_whose_filling_fails_changes_nothing() -> None:
    old, new = filled(1), filled(2)
    before, num_free = uses(new), new.cache.num_free_pages

    def fill(rows: np.ndarray, pages: np.ndarray) -> None:
        raise SnapshotError("damaged")
    with pytest.raises(SnapshotError):
        unpack(new.cache, old.pack()[0], fill)
    assert uses(new) == before and new.cache.num_free_pages == num_free
    new.cache.check_invariants()


def test_unpack_long_chain_takes_linear_space_and_keeps_depth() -> None:
    old, new = FakeKV(num_pages=32), FakeKV(num_pages=32)
    prompt: list[int] = []
    for turn in range(20):
        prompt += [turn] * 4
        old.run(prompt)
    packed, content = old.pack()
    assert len(packed.tokens) == len(prompt)
    new.unpack(packed, content)
    assert new.found(prompt) == len(prompt)


# -- the folder

def save(path: Path, kv: FakeKV, identity: SnapshotIdentity = IDENTITY) -> list[list[list]]:
    """Saves with page files that are large enough to have no digest in the manifest, and a small one."""
    packed, content = kv.pack()
    with new_snapshot(path, identity, packed) as pages:
        write_pages(pages)
    return content


def write_pages(pages: Path) -> None:
    (pages / "k.0").mkdir(parents=True)
    (pages / "k.0" / "zarr.json").write_text("{}")
    (pages / "k.0" / "c.0").write_bytes(bytes(70_000))


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != ".lock")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "snapshot", filled(0))
    return tmp_path / "snapshot"


def test_snapshot_saved_and_opened_gives_the_same_tree(tmp_path: Path) -> None:
    old, new = filled(4), FakeKV()
    content = save(tmp_path / "deep" / "snapshot", old)
    opened = open_snapshot(tmp_path / "deep" / "snapshot", IDENTITY)
    new.unpack(opened.tree, content)
    assert uses(new) == uses(old)
    assert opened.tree.namespaces == tuple(old.cache.tree.roots)
    assert (opened.pages_folder / "k.0" / "c.0").exists() and opened.created.endswith("+00:00")


def test_snapshot_of_an_empty_cache_opens(tmp_path: Path) -> None:
    packed, _ = FakeKV().pack()
    with new_snapshot(tmp_path / "s", IDENTITY, packed):
        pass
    assert open_snapshot(tmp_path / "s", IDENTITY).tree.num_rows == 0
    assert FakeKV().unpack(open_snapshot(tmp_path / "s", IDENTITY).tree, [[]]) == Unpacked(0, 0, 0)


def test_snapshot_saved_again_replaces_the_old_data(saved: Path) -> None:
    first = open_snapshot(saved, IDENTITY)
    (saved / "data-0123456789abcdef").mkdir()             # what a killed save leaves
    save(saved, filled(9))
    second = open_snapshot(saved, IDENTITY)
    assert not first.pages_folder.exists() and len(list(saved.glob("data-*"))) == 1
    assert len(second.tree.tokens) != len(first.tree.tokens)


def test_snapshot_files_hold_no_pickle(saved: Path) -> None:
    with np.load(open_snapshot(saved, IDENTITY).pages_folder.parent / "tree.npz", allow_pickle=False) as arrays:
        assert all(array.dtype != object for array in arrays.values())


@pytest.mark.parametrize("field, value", [
    ("weights", "w2"), ("config", "c2"), ("tokenizer", "t2"), ("weight_dtype", "bfloat16"), ("kv_dtype", "bfloat16"),
    ("page_size", 16), ("num_layers", 3), ("num_kv_heads", 2), ("head_dim", 4), ("groups", ((0,), (1,)))])
def test_open_with_another_identity_names_field_values_and_remedy(saved: Path, field: str, value: object) -> None:
    with pytest.raises(SnapshotError) as caught:
        open_snapshot(saved, replace(IDENTITY, **{field: value}))
    expected = [list(layers) for layers in value] if field == "groups" else value
    had = IDENTITY.as_json()[field]
    message = str(caught.value)
    assert f"({field})" in message and f"it has {had!r}, expected {expected!r}" in message and "save a new" in message


def test_open_where_nothing_is_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(SnapshotError, match="no snapshot in"):
            open_snapshot(path, IDENTITY)


@pytest.mark.parametrize("damage", ["cut", "grown", "missing", "flipped"])
def test_open_with_any_damaged_file_names_it(saved: Path, damage: str) -> None:
    for file in files_of(saved):
        data = file.read_bytes()
        if damage == "flipped" and file.name == "c.0":
            continue                      # found by the checksum of the one who reads it
        if damage == "missing":
            file.unlink()
        else:
            middle = len(data) // 2
            file.write_bytes({"cut": data[:-1], "grown": data + b" x",
                              "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1:]}[damage])
        if not (damage == "cut" and file.name == "manifest.json"):     # its last byte is a line end
            with pytest.raises(SnapshotError, match=file.name):
                open_snapshot(saved, IDENTITY)
        file.write_bytes(data)
    open_snapshot(saved, IDENTITY)


def test_open_with_a_flipped_byte_anywhere_in_the_manifest_is_refused_or_harmless(saved: Path) -> None:
    file = saved / "manifest.json"
    data, tokens = file.read_bytes(), open_snapshot(saved, IDENTITY).tree.tokens
    num_refused = 0
    for position in range(0, len(data), 11):
        file.write_bytes(data[:position] + bytes([data[position] ^ 2]) + data[position + 1:])
        try:
            assert np.array_equal(open_snapshot(saved, IDENTITY).tree.tokens, tokens)     # white space
        except SnapshotError:
            num_refused += 1
    assert num_refused > len(data) / 11 / 2


def test_open_with_an_additional_file_names_it(saved: Path) -> None:
    pages = open_snapshot(saved, IDENTITY).pages_folder
    (pages / "k.0" / "c.1").write_bytes(b"")
    with pytest.raises(SnapshotError, match="c.1: it does not belong there"):
        open_snapshot(saved, IDENTITY)


def test_open_another_format_says_which_is_read(saved: Path) -> None:
    file = saved / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    with pytest.raises(SnapshotError, match="format 99, this version reads 1"):
        open_snapshot(saved, IDENTITY)


# -- saves that fail

@contextlib.contextmanager
def keeps(path: Path):
    """What is in a folder is the same afterwards, and opens if it did."""
    before = {file: file.read_bytes() for file in files_of(path)}
    yield
    assert {file: file.read_bytes() for file in files_of(path)} == before
    open_snapshot(path, IDENTITY)


def test_save_whose_pages_fail_keeps_the_old_snapshot(saved: Path) -> None:
    with keeps(saved), pytest.raises(SnapshotError, match="no space"):
        with new_snapshot(saved, IDENTITY, filled(1).pack()[0]) as pages:
            write_pages(pages)
            raise SnapshotError("no space")


def test_save_interrupted_keeps_the_old_snapshot(saved: Path) -> None:
    with keeps(saved), pytest.raises(KeyboardInterrupt):
        with new_snapshot(saved, IDENTITY, filled(1).pack()[0]) as pages:
            write_pages(pages)
            raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["savez", "fsync", "replace", "mkdir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_save_that_cannot_write_keeps_the_old_snapshot(saved: Path, monkeypatch: pytest.MonkeyPatch, name: str,
                                                       code: int) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))
    owner = {"savez": np, "fsync": os, "replace": os, "mkdir": Path}[name]
    with keeps(saved), monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(SnapshotError, match=os.strerror(code)):
            save(saved, filled(1))


def test_save_that_fails_in_a_new_folder_leaves_none(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError):
        with new_snapshot(tmp_path / "s", IDENTITY, filled(1).pack()[0]) as pages:
            write_pages(pages)
            raise SnapshotError("no space")
    assert list(tmp_path.iterdir()) == []


def test_save_to_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SnapshotError, match="file"):
            save(path, FakeKV())
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_save_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(SnapshotError, match="Permission denied"):
        save(tmp_path / "closed" / "s", FakeKV())


@pytest.mark.parametrize("name, text", [("notes.txt", "mine"), ("manifest.json", "{}"), ("manifest.json", "not JSON")])
def test_save_into_a_folder_of_something_else_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SnapshotError, match=name):
        save(tmp_path, FakeKV())
    assert [file.name for file in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == text


def test_save_while_another_saves_is_refused(saved: Path) -> None:
    with new_snapshot(saved, IDENTITY, filled(1).pack()[0]) as pages:
        write_pages(pages)
        with pytest.raises(SnapshotError, match="another process is saving"):
            save(saved, filled(2))
    assert len(open_snapshot(saved, IDENTITY).tree.tokens) == len(filled(1).pack()[0].tokens)


KILLED = """
    import os, sys
    from pathlib import Path
    import numpy as np
    sys.path.insert(0, {tests!r})
    import test_snapshot as t
    done = []
    def count(name, function):
        def counted(*args, **kwargs):
            done.append(name)
            if len(done) == {after}:
                os._exit(9)
            return function(*args, **kwargs)
        return counted
    for owner, name in ((np, "savez"), (os, "fsync"), (os, "replace"), (os, "open"), (Path, "mkdir")):
        setattr(owner, name, count(name, getattr(owner, name)))
    t.save(Path({path!r}), t.filled(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", range(1, 17))
def test_save_killed_anywhere_leaves_a_whole_snapshot(saved: Path, after: int) -> None:
    killed_save_leaves_one(saved, after)


@pytest.mark.parametrize("after", [7, 12])
def test_save_killed_leaves_a_whole_snapshot(saved: Path, after: int) -> None:
    killed_save_leaves_one(saved, after)


def killed_save_leaves_one(path: Path, after: int) -> None:
    """Kills a save at its n-th call of the system; the folder then holds the old or the new one, and is usable."""
    old, new = (len(filled(seed).pack()[0].tokens) for seed in (0, 1))
    script = KILLED.format(tests=str(Path(__file__).parent), after=after, path=str(path))
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60,
                           env={**os.environ, "PYTHONPATH": str(Path(snapshot_module.__file__).parents[2])})
    assert ended.returncode in (0, 9), ended.stderr
    assert len(open_snapshot(path, IDENTITY).tree.tokens) in (old, new)
    save(path, filled(1))
    assert len(open_snapshot(path, IDENTITY).tree.tokens) == new and len(list(path.glob("data-*"))) == 1
