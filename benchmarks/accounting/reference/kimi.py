"""The published Kimi K3 step at one row on 32 ranks, as far as its schedule is described.

Loads stop where its one pool of VMEM makes them stop: experts load when they are routed, the next
layer's attention loads when the last expert is done. A layer waits for its busiest group of ranks,
which reads twice the mean. Work of which no figure is known counts nothing.
"""

from __future__ import annotations

from benchmarks.accounting.program import Program
from benchmarks.accounting.reference.builder import ScheduleWriter, product_cycles

__all__ = ["PUBLISHED_US", "head", "step"]

PUBLISHED_US = 4020.0
"""249 tokens a second."""
LAYERS, MLA_EVERY = 93, 4
HIDDEN, LATENT, BF16, F32 = 7168, 3584, 2, 4

KDA_BYTES = 31.29e6
MLA_EARLY_BYTES, MLA_LATE_BYTES = 31.2e6, 14.15e6
"""q_a and kv_a load with the layer before, the rest when attention starts."""
ROUTER_BYTES, LATENT_UP_BYTES = 7.34e6, 7.34e6
LATENT_DOWN_BYTES, SHARED_BYTES = 1.84e6, 8.26e6
EXPERT_BYTES = 7.01e6
EXPERTS = 4
"""Of the busiest group: 16 routed experts over 8 groups, twice the mean."""
OUTSIDE_BYTES = 124e6
"""Dense first layer and head: all dense bytes, 5.65 GB, less those of the layers."""

STATE_BYTES = 3 * 128 * 128 * F32
RECURRENCE_CYCLES = 820
EXPERT_CYCLES = 2268
TOP_K_CYCLES = 4758
LANES, HOSTS, PEERS = 7, 3, 31
"""Peers on the host, other hosts, all peers."""
KEY_BYTES = 3 * (256 + 128) * BF16
"""Of one cached position and layer."""


def step(position: int) -> Program:
    """All layers of the kernel."""
    write = ScheduleWriter("published step")
    write.exchange(PEERS, 0)  # the entry barrier
    _prefetch(write, 0)
    for layer in range(LAYERS):
        if _is_mla(layer):
            _mla(write, position)
        else:
            _kda(write)
        _reduce_attention(write)
        if layer:
            _experts(write, layer)
        else:
            _prefetch(write, 1)
    return write.program()


def head() -> Program:
    """What runs outside of the kernel or without routing: read at the sustained bandwidth."""
    write = ScheduleWriter("published head")
    write.load("dense", OUTSIDE_BYTES, "weights")
    write.wait("dense", OUTSIDE_BYTES, "weights")
    return write.program()


def _is_mla(layer: int) -> bool:
    """24 of 93 layers: each fourth, and the last."""
    return layer % MLA_EVERY == MLA_EVERY - 1 or layer == LAYERS - 1


def _prefetch(write: ScheduleWriter, layer: int) -> None:
    write.load("attention", MLA_EARLY_BYTES if _is_mla(layer) else KDA_BYTES, "weights")
    if not _is_mla(layer):
        write.load("state", STATE_BYTES, "state")
    write.load("router", ROUTER_BYTES, "weights")


def _kda(write: ScheduleWriter) -> None:
    write.wait("attention", KDA_BYTES, "weights")
    write.work(product_cycles(KDA_BYTES), "projections")
    write.wait("state", STATE_BYTES, "state")
    write.work(RECURRENCE_CYCLES, "delta rule")
    write.store("state written", STATE_BYTES, "state")


def _mla(write: ScheduleWriter, position: int) -> None:
    write.load("late", MLA_LATE_BYTES, "weights")
    write.load("keys", position * KEY_BYTES, "cache")
    write.wait("attention", MLA_EARLY_BYTES, "weights")
    write.work(product_cycles(MLA_EARLY_BYTES), "projections")
    write.wait("late", MLA_LATE_BYTES, "weights")
    write.wait("keys", position * KEY_BYTES, "cache")
    write.work(product_cycles(MLA_LATE_BYTES), "projections")


def _reduce_attention(write: ScheduleWriter) -> None:
    """Features with the sibling, halves with the 15 ranks of equal parity, halves swapped."""
    write.exchange(1, 384 * BF16, sibling=True)
    write.exchange(15, HIDDEN // 2 * BF16)
    write.exchange(1, HIDDEN // 2 * BF16, sibling=True)


def _experts(write: ScheduleWriter, layer: int) -> None:
    write.load("shared", LATENT_DOWN_BYTES + SHARED_BYTES, "weights")
    write.wait("router", ROUTER_BYTES, "weights")
    write.work(product_cycles(ROUTER_BYTES), "router")
    write.exchange(1, 512 * F32, sibling=True)
    write.work(TOP_K_CYCLES, "top k")
    for number in range(EXPERTS):
        write.load("expert", EXPERT_BYTES, "experts", number)
    write.wait("shared", LATENT_DOWN_BYTES + SHARED_BYTES, "weights")
    write.work(product_cycles(LATENT_DOWN_BYTES), "latent")
    write.send("latent", PEERS, 128 * BF16)
    write.work(product_cycles(SHARED_BYTES), "shared expert")
    write.send("shared sum", LANES, HIDDEN * BF16)
    write.receive("latent")
    for number in range(EXPERTS):
        write.wait("expert", EXPERT_BYTES, "experts", number)
        write.work(EXPERT_CYCLES, "experts")
    write.load("latent up", LATENT_UP_BYTES, "weights")
    write.send("routed sum", LANES, LATENT * BF16)
    if layer + 1 < LAYERS:
        _prefetch(write, layer + 1)
    write.receive("shared sum")
    write.exchange(HOSTS, HIDDEN * BF16)
    write.receive("routed sum")
    write.exchange(HOSTS, LATENT * BF16)
    write.wait("latent up", LATENT_UP_BYTES, "weights")
    write.work(product_cycles(LATENT_UP_BYTES), "latent")
    write.exchange(LANES, 1024 * BF16)
