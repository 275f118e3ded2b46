"""Engines to compare jradix with, each in a process and an environment of its own."""
