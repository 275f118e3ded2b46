"""Structured output, host side: from a regex or a JSON schema to the tables that constrain sampling. No jax here."""
