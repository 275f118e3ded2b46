"""Device operations: KV cache, paged attention, sampling. They know arrays, not requests."""
