"""What a kernel says when it cannot serve its arguments."""
from __future__ import annotations


class UnsupportedKernel(ValueError):
    """The kernel does not serve these shapes, types or this device; the text says what it serves."""
