"""The prefix cache: pages, the radix tree over token ids, eviction, and the leases that requests hold. No jax here."""
