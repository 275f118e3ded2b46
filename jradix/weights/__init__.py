"""Checkpoints in and out: safetensors, GGUF and Orbax, all in Hugging Face's tensor names."""
