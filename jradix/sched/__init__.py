"""The scheduler: which tokens of which requests run in the next step. No jax here."""
