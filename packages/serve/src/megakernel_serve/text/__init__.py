"""From generated token ids to text that may be shown: whole code points, cut at stop strings.

And the other way round, a bound on what so many ids can hold.
"""

from megakernel_serve.text.answer import ChatAnswer, TextAnswer
from megakernel_serve.text.detokenizer import Detokenizer
from megakernel_serve.text.length import LengthBound
from megakernel_serve.text.stop_strings import StopScanner

__all__ = ["ChatAnswer", "Detokenizer", "LengthBound", "StopScanner", "TextAnswer"]
