"""The table of counts: a dict in every respect, readable when printed."""
from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest

from jradix.stats_table import Stats, format_value

VALUES = dict(pool=dict(num_pages=10240, page_size=16, kv_bytes=3 << 30), cache=dict(enabled=True, hit_rate=0.7312),
              host_time=dict(schedule_s=0.0123, wait_s=123456.7), steps=1234567, device="cpu:0 (cpu)")


def test_stats_printed_is_an_aligned_table() -> None:
    assert str(Stats(VALUES)) == """\
pool
  pages         10,240
  page size         16
  kv           3.0 GiB
cache
  enabled    yes
  hit rate       73.1%
host time
  schedule     12.3 ms
  wait       123,457 s
steps        1,234,567
device       cpu:0 (cpu)"""


def test_stats_is_a_plain_dict_but_for_str() -> None:
    stats = Stats(VALUES)
    assert stats == VALUES and repr(stats) == repr(VALUES) and stats["pool"]["num_pages"] == 10240
    assert json.loads(json.dumps(stats)) == VALUES
    for twin in (pickle.loads(pickle.dumps(stats)), copy.deepcopy(stats)):
        assert type(twin) is Stats and twin == VALUES


def test_stats_html_is_well_formed_and_escaped() -> None:
    markup = Stats({"<b>": {"device": "<cpu> & more", "steps": 1200}})._repr_html_()
    table = ElementTree.fromstring(markup)
    assert [cell.text for cell in table.iter() if cell.text] == ["<b>", "device", "<cpu> & more", "steps", "1,200"]
    assert table.findall(".//tr")[2].findall("td")[1].get("style") == "text-align:right"


def test_stats_empty_prints_nothing() -> None:
    assert str(Stats()) == "" and ElementTree.fromstring(Stats()._repr_html_()).tag == "table"


def test_stats_deeper_levels_are_indented() -> None:
    assert str(Stats(a=dict(b=dict(c=1)))).splitlines() == ["a", "  b", "    c  1"]


@pytest.mark.parametrize("name, value, text", [
    ("num_pages", 1234567, "1,234,567"), ("n", np.int32(4096), "4,096"), ("x", 1.5, "1.5"),
    ("x", 12345.678, "12,345.68"), ("x", 0.0, "0"), ("hit_rate", 1, "100.0%"),
    ("max_pinned_fraction", np.float32(0.5), "50.0%"), ("rate", 0.0, "0.0%"), ("generate", 2, "2"),
    ("wait_s", 0, "0 s"), ("wait_s", 0.0000051, "5.1 µs"), ("wait_s", 0.00099, "990 µs"),
    ("wait_s", 0.0009996, "1 ms"), ("wait_s", 0.25, "250 ms"), ("wait_s", 0.99961, "1 s"),
    ("wait_s", 12.34, "12.3 s"), ("wait_s", 99.97, "100 s"), ("uptime_s", 86400, "86,400 s"),
    ("kv_bytes", 512, "512 B"), ("kv_bytes", 1536, "1.5 KiB"), ("kv_bytes", 5 << 50, "5,120.0 TiB"),
    ("limit", None, "-"), ("is_on", False, "no"), ("hit_rate", float("nan"), "nan"), ("ttl_s", float("inf"), "inf"),
    ("sizes", (1, 2000), "1, 2,000"), ("sizes", [], "-"), ("policy", "lru", "lru"),
    ("eviction_policy_s", "lru", "lru"), ("change", -5_000, "-5,000"),
])
def test_format_value_follows_type_and_unit(name: str, value: Any, text: str) -> None:
    assert format_value(name, value) == text


def test_stats_module_imports_the_standard_library_only() -> None:
    code = "import sys, jradix.stats_table; print([m for m in ('numpy', 'jax', 'rich') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
