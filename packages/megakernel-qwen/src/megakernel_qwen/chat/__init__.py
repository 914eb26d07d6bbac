"""The chat format of Qwen3.8: conversations to token ids, generated ids to events."""

from megakernel_qwen.chat.dialect import QWEN3_8, Dialect, read_dialect
from megakernel_qwen.chat.format import QwenChatFormat
from megakernel_qwen.chat.parser import QwenChatParser

__all__ = ["QWEN3_8", "Dialect", "QwenChatFormat", "QwenChatParser", "read_dialect"]
