"""Text to tokens, and toy data. Here are the few names that configurations share with it."""

from typing import Literal

BYTES: Literal["bytes"] = "bytes"
"""The tokenizer that needs no file."""
END = "<|endoftext|>"
"""How the end of a text is written."""
Packing = Literal["wrapped", "plain", "sentences"]
"""How documents are packed into blocks."""
