"""Programs of several calls: text, generated parts, choices and forks over one engine (the terms of SGLang)."""
