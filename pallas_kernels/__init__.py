"""Paged attention kernels in Pallas: `mosaic_gpu` for Hopper GPUs, `pallas_tpu` for TPUs. Imports jax only."""
