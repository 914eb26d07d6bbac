"""Weights of a whole step as one stream through a ring of slots in VMEM that never drains."""

from vmem_pool.stream.image import image, slots
from vmem_pool.stream.matvec import matvec
from vmem_pool.stream.plan import Segment, StreamPlan, choose_slot_bytes, plan_stream
from vmem_pool.stream.ring import Ring, SegmentReader, Stream, TakenTile, ring_scratch
from vmem_pool.stream.show import print_stream
from vmem_pool.stream.tiles import Cut, Matrix, Span, Tile
from vmem_pool.stream.unpack import unpack_matrix

__all__ = [
    "Cut",
    "Matrix",
    "Ring",
    "Segment",
    "SegmentReader",
    "Span",
    "Stream",
    "StreamPlan",
    "TakenTile",
    "Tile",
    "choose_slot_bytes",
    "image",
    "matvec",
    "plan_stream",
    "print_stream",
    "ring_scratch",
    "slots",
    "unpack_matrix",
]
