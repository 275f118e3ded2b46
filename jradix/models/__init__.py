"""The decoder: its config, layers and the table of architectures it can be."""
