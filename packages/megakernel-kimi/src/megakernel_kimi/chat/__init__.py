"""The chat format: conversations to token ids, generated ids to events.

A conversation is a sequence of messages in tags. Only control tokens make a tag: the open or close
token, a name with attributes as ordinary text, and the separator token. What users write is always
encoded as ordinary text, so it can never form a tag.
"""

from megakernel_kimi.chat.format import KimiChatFormat, KimiRendered

__all__ = ["KimiChatFormat", "KimiRendered"]
