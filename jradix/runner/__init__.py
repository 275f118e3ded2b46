"""The runner: compiled steps over the model, the KV cache and the per-slot state. It never sees a request."""
