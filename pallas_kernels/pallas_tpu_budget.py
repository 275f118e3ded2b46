"""What one walk takes of a TPU core's VMEM and SMEM, and the choice of a layout that fits."""
from __future__ import annotations

from collections.abc import Iterable

import jax

from pallas_kernels.errors import UnsupportedKernel
from pallas_kernels.pallas_tpu_walk import LANES, Items, Layout

# Scoped VMEM that the compiler grants a kernel, by device kind; the others grant 16 MiB.
_VMEM_BYTES = {"TPU v6 lite": 32 << 20, "TPU v6e": 32 << 20}
_VMEM_OF_OTHERS = 512 << 10      # measured: 136 KiB in the step of an 8B model beyond what the kernel takes alone
_SMEM_BYTES = (1 << 20) - 4096      # the compiler keeps some for itself


def device_kind() -> str:
    """Kind of the device a kernel traced now is meant for: the abstract mesh's, or the default one."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if abstract is None else abstract.device_kind


def vmem_budget() -> int:
    """Bytes of VMEM that one kernel may take: what the program around it keeps there is left out."""
    return _VMEM_BYTES.get(device_kind(), 16 << 20) - _VMEM_OF_OTHERS


def vmem_bytes(layout: Layout) -> int:
    """Bytes of VMEM of one walk: page buffers, pipelined tiles, scratch, and temporaries.

    Arrays are padded to tiles of 8 x 128 words.
    """
    size = layout.dtype.itemsize
    tile = layout.num_bundles * _up(layout.rows, 32 // size)
    width = _up(layout.num_kv_heads * layout.head_dim, LANES)
    head, lanes = _up(layout.head_dim, LANES), _up(layout.lanes, LANES)
    is_wide = layout.heads_per_bundle > 1
    pages = 2 * layout.num_stages * layout.step_tokens * width * size
    queries = tile * (2 * head + (lanes if is_wide else 0)) * size
    results = 2 * tile * head * 4 + 2 * _up(layout.num_bundles, 8) * _up(layout.rows, LANES) * 4
    state = tile * (lanes + 2 * LANES) * 4
    rows, keys = _up(layout.rows, 8), _up(layout.step_tokens, LANES)
    # Copies of scores and weighted values that the compiler spills, fitted from above to what it reports when memory
    # runs out: more where more bundles overlap, and where float32 products are split into passes.
    first, each = (3.5, 1.15) if size == 4 else (2, 0.5)
    spilled = (first + each * (layout.num_bundles - 1)) * rows * (keys + lanes) * 4
    return pages + queries + results + state + int(spilled)


def choose(kernel: str, layouts: Iterable[Layout]) -> Layout:
    """The first layout that fits.

    Raises:
      UnsupportedKernel: none fits.
    """
    budget = vmem_budget()
    for layout in layouts:
        needed = vmem_bytes(layout)
        if needed <= budget:
            return layout
    raise UnsupportedKernel(
        f"{kernel}: {layout.num_kv_heads} kv heads of {layout.head_dim} with {layout.tile_tokens} x "
        f"{layout.num_kv_heads * layout.group} queries of {layout.dtype} and steps of {layout.step_tokens} keys, "
        f"{layout.num_stages} stages, take {needed:,} bytes of VMEM of {budget:,}; give smaller blocks")


def check_smem(kernel: str, num_rows: int, num_pages: int, num_items: int) -> None:
    """Raises:
      UnsupportedKernel: the page table and the items do not fit SMEM.
    """
    needed = 4 * (num_rows * num_pages + (len(Items._fields) + 1) * _up(num_items + 1, LANES))
    if needed > _SMEM_BYTES:
        raise UnsupportedKernel(f"{kernel}: a page table of {num_rows} x {num_pages} and {num_items} work items take "
                                f"{needed:,} bytes of SMEM of {_SMEM_BYTES:,}; give fewer rows or larger pages")


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
