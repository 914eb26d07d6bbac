"""Kernel weights on disk, ready for one layout: converting a checkpoint, finding, loading."""

from megakernel_kimi.container.find import VARIABLE, find_converted, open_source
from megakernel_kimi.container.load import load_converted
from megakernel_kimi.container.opened import Converted, ConvertedFolder
from megakernel_kimi.container.target import Target
from megakernel_kimi.container.write import check_folder, convert

__all__ = [
    "VARIABLE",
    "Converted",
    "ConvertedFolder",
    "Target",
    "check_folder",
    "convert",
    "find_converted",
    "load_converted",
    "open_source",
]
