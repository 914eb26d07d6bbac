"""The checkpoint's tokenizer, converted from its rank file without running any of its code."""

from megakernel_kimi.tokenizer.kimi import KimiTokenizer, load_tokenizer

__all__ = ["KimiTokenizer", "load_tokenizer"]
