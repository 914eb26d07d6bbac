"""Exchanges that feed one another inside a kernel, split where other work fits in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpu_collectives.exchange import Exchange, ExchangeRefs
from tpu_collectives.steps import Kind, Step
from tpu_collectives.wire import Wire

__all__ = ["Chain", "ChainRefs", "Chained", "Handle", "parity_of", "sum_in_order"]

ChainRefs = tuple[ExchangeRefs, ...]
"""Scratch of a collective, one entry per phase: shapes outside the kernel, refs inside."""


@dataclass(frozen=True)
class Handle:
    """A collective in flight: made by ``start`` or ``resume``, consumed by ``finish``.

    Args:
        refs: the scratch in use.
        parity: which of the two areas; int32, traced.
        done: phases that have ended.
    """

    refs: Any
    parity: jax.Array
    done: int = 0


def parity_of(phase: Any) -> jax.Array:
    """The area of use number ``phase`` (int or int32, not negative): 0 or 1."""
    return lax.rem(jnp.int32(phase), jnp.int32(2))


def sum_in_order(blocks: list[jax.Array]) -> jax.Array:
    """The f32 sum ((b0 + b1) + b2) + ..., the same on every rank that holds the same blocks."""
    total = blocks[0].astype(jnp.float32)
    for block in blocks[1:]:
        total = total + block.astype(jnp.float32)
    return total


@dataclass(frozen=True)
class Chain:
    """Phases of which each works on what the one before gave.

    Args:
        steps: phases in order, at least one.
        rows: rows of every block.
        dtype: what travels; the result of every phase is rounded to it.
        axis: mesh axis whose index is the rank.
        combine: blocks in the order of their ranks -> one block.
    """

    steps: tuple[Step, ...]
    rows: int
    dtype: Any
    axis: str
    combine: Callable[[list[jax.Array]], jax.Array] = sum_in_order

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The exchange of each phase."""
        return tuple(
            Exchange(
                step.level,
                Wire(self.rows, step.columns, self.dtype),
                self.axis,
                distinct=step.kind is Kind.SCATTER,
            )
            for step in self.steps
        )

    def scratch(self) -> ChainRefs:
        """Buffers and semaphores of all phases."""
        return tuple(exchange.scratch() for exchange in self.exchanges)

    def send(self, handle: Handle, x: jax.Array) -> None:
        """Start the phase after those that are done with [rows, columns] of data."""
        step, exchange = self.steps[handle.done], self.exchanges[handle.done]
        refs = handle.refs[handle.done]
        if step.kind is Kind.SCATTER:
            starts = [position * step.columns for position in range(step.level.size)]
            blocks = [x[:, start : start + step.columns] for start in starts]
            exchange.push_each(refs, handle.parity, blocks)
        else:
            exchange.push(refs, handle.parity, x)

    def receive(self, handle: Handle) -> jax.Array:
        """Wait for the blocks of the phase in flight and combine them."""
        step, refs = self.steps[handle.done], handle.refs[handle.done]
        exchange = self.exchanges[handle.done]
        exchange.wait_received(refs, handle.parity)
        blocks = [exchange.received(refs, handle.parity, s) for s in range(step.level.size)]
        if step.kind is Kind.GATHER:
            return jnp.concatenate(blocks, axis=1)
        return self.combine(blocks).astype(self.dtype)

    def advance(self, handle: Handle) -> Handle:
        """Wait for the phase in flight and send the next, unless it is the last."""
        if handle.done + 1 == len(self.steps):
            return handle
        value = self.receive(handle)
        following = replace(handle, done=handle.done + 1)
        self.send(following, value)
        return following

    def finish(self, handle: Handle) -> jax.Array:
        """What the last phase gives, after all sends have left."""
        for _ in range(len(self.steps) - handle.done - 1):
            handle = self.advance(handle)
        value = self.receive(handle)
        for exchange, refs in zip(self.exchanges, handle.refs):
            exchange.wait_sent(refs)
        return value


class Chained:
    """What a kernel does with a collective that is a chain: start, other work, finish."""

    @property
    def _chain(self) -> Chain:
        raise NotImplementedError

    def scratch(self) -> ChainRefs:
        """Buffers and semaphores, for ``scratch_shapes``; they live for the whole kernel."""
        return self._chain.scratch()

    @property
    def vmem_bytes(self) -> int:
        """VMEM of all areas, with the rows that tiles add."""
        return sum(exchange.vmem_bytes for exchange in self._chain.exchanges)

    def start(self, refs: ChainRefs, x: jax.Array, phase: Any) -> Handle:
        """Send this rank's data and return at once.

        Args:
            refs: what the kernel got for :meth:`scratch`.
            x: data of the shape and dtype of ``input``.
            phase: number of this use of ``refs``: 0, 1, 2, ... on all ranks alike; int or int32.
        """
        handle = self.resume(refs, phase)
        self._chain.send(handle, self._pack(x))
        return handle

    def resume(self, refs: ChainRefs, phase: Any, done: int = 0) -> Handle:
        """The handle of a use that was started, and advanced ``done`` times, somewhere else.

        Handles cannot be carried by a loop; refs and the number of the use can.
        """
        return Handle(refs, parity_of(phase), done)

    def advance(self, handle: Handle) -> Handle:
        """Wait for the phase in flight and send the next, unless it is the last."""
        return self._chain.advance(handle)

    def finish(self, handle: Handle) -> jax.Array:
        """Wait for the remaining phases and for all sends; data as ``output`` describes it."""
        return self._unpack(self._chain.finish(handle))

    def __call__(self, refs: ChainRefs, x: jax.Array, phase: Any) -> jax.Array:
        """``finish(start(..))``, where nothing fits in between."""
        return self.finish(self.start(refs, x, phase))

    def _pack(self, x: jax.Array) -> jax.Array:
        return x

    def _unpack(self, value: jax.Array) -> jax.Array:
        return value
