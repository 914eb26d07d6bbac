"""Broken copies of the protocol: every one must be caught by the checks that the tests rely on.

Not covered: a missing entry barrier, since the interpreter starts all ranks together.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from tpu_collectives import AllReduce, Barrier, ExchangeError, Topology, reference
from tpu_collectives.chain import sum_in_order
from tpu_collectives.exchange import Exchange
from tpu_collectives.testing import repeated, run_isolated, wide_range

USES = 4
FOUR = Topology.virtual(4)


class OneArea(Exchange):
    """Use c+1 overwrites what a slow rank still reads of use c."""

    def push(self, refs, parity, block):
        super().push(refs, parity * 0, block)

    def received(self, refs, parity, sender):
        return super().received(refs, parity * 0, sender)

    def wait_received(self, refs, parity):
        super().wait_received(refs, parity * 0)


class Skewed(Exchange):
    """Right, but rank 1 dawdles before its last send, so that its first receivers run ahead."""

    def push(self, refs, parity, block):
        me = self.position()
        own = refs.receive.at[parity, me]
        own[...] = self.wire.encode(block)
        *first, last = self._peers(me)
        for peer in first:
            self._copy(own, refs, parity, me, peer).start()

        @pl.when(me == 1)
        def _():
            @pl.loop(0, 100)
            def _(_turn):
                pl.semaphore_signal(pltpu.get_barrier_semaphore(), 1)
                pl.semaphore_wait(pltpu.get_barrier_semaphore(), 1)

        self._copy(own, refs, parity, me, last).start()


class OneSemaphore(Skewed):
    """Two areas, but bytes of use c+1 satisfy a wait for use c."""

    def _copy(self, source, refs, parity, me, peer):
        first = OneSemaphoreRefs(refs)
        return super()._copy(source, first, parity, me, peer)

    def wait_received(self, refs, parity):
        super().wait_received(refs, parity * 0)


@dataclass(frozen=True)
class OneSemaphoreRefs:
    """Refs whose receive semaphore is the first one, whatever the parity."""

    refs: object

    def __getattr__(self, name):
        return getattr(self.refs, name)

    @property
    def receive_sems(self):
        return self

    @property
    def at(self):
        return self

    def __getitem__(self, _parity):
        return self.refs.receive_sems.at[0]


class ReadsBeforeWaiting(Exchange):
    """The wait for arrivals stands after the reads."""

    def wait_received(self, refs, parity):
        pass

    def received(self, refs, parity, sender):
        block = super().received(refs, parity, sender)
        if sender == self.level.size - 1:
            super().wait_received(refs, parity)
        return block


class WaitsForTooLittle(Exchange):
    """The wait counts one block less than arrives."""

    def wait_received(self, refs, parity):
        blocks = refs.receive.at[0, pl.ds(0, self.level.size - 2)]
        pltpu.make_async_copy(blocks, blocks, refs.receive_sems.at[parity]).wait()


class NeverWaitsForSends(Exchange):
    """Sources are written again while they may still be read; bytes stay in the semaphore."""

    def wait_sent(self, refs):
        pass


class SumsFromItself(Exchange):
    """Every rank adds its own term first, then those of its neighbours."""

    def received(self, refs, parity, sender):
        turned = lax.rem(self.position() + sender, self.level.size)
        return super().received(refs, parity, turned)


class KeepsItsOwnTerm(Exchange):
    """A rank adds its own term as it was before rounding to the wire dtype."""

    def push(self, refs, parity, block):
        object.__setattr__(self, "own", block)
        super().push(refs, parity, block)

    def received(self, refs, parity, sender):
        block = super().received(refs, parity, sender).astype(jnp.float32)
        return jnp.where(self.position() == sender, self.own, block)


class SignalsTwice(Barrier):
    """One signal more than the barrier waits for."""

    def signal(self):
        super().signal()
        pl.semaphore_signal(pltpu.get_barrier_semaphore(), 1)


def fault_of(comm):
    """What the checks say about a collective: '' if it is right."""
    terms = wide_range((comm.topology.ranks, USES, comm.rows, comm.width))
    try:
        (sums,) = repeated(comm, USES).check(terms)
    except ExchangeError as error:
        return str(error)
    wanted = [
        reference.all_reduce(comm.topology, terms[:, i], comm.wire_dtype) for i in range(USES)
    ]
    return "" if np.array_equal(sums, np.stack([wanted] * len(sums))) else "other bits"


@pytest.mark.parametrize("exchange", [Exchange, Skewed])
def test_the_protocol_itself_has_no_fault(monkeypatch, exchange):
    monkeypatch.setattr("tpu_collectives.chain.Exchange", exchange)
    assert fault_of(AllReduce(FOUR, 1, 256, jnp.float32, schedule=0)) == ""


@pytest.mark.parametrize(
    ("mutant", "fault"),
    [
        (OneArea, "not ordered"),
        (OneSemaphore, "not ordered"),
        (ReadsBeforeWaiting, "not ordered"),
        (WaitsForTooLittle, "not ordered|must be zero"),
        (NeverWaitsForSends, "not ordered|must be zero"),
        (SumsFromItself, "other bits"),
    ],
)
def test_a_broken_exchange_is_caught(monkeypatch, mutant, fault):
    monkeypatch.setattr("tpu_collectives.chain.Exchange", mutant)
    found = fault_of(AllReduce(FOUR, 1, 256, jnp.float32, schedule=0))
    assert any(words in found for words in fault.split("|")), found or "not caught"


def test_a_send_that_nobody_waits_for_is_caught_where_nothing_else_shows_it(monkeypatch):
    monkeypatch.setattr("tpu_collectives.chain.Exchange", NeverWaitsForSends)
    program = repeated(AllReduce(Topology.virtual(2), 1, 256), 1)  # one use: no source is reused
    data = wide_range((2, 1, 1, 256))
    assert not program.interpret(data, dma="eager").raced
    with pytest.raises(ExchangeError, match="semaphores must be zero"):
        program.interpret(data, dma="eager").check()


def test_a_leaked_signal_is_caught(monkeypatch):
    monkeypatch.setattr("tpu_collectives.program.Barrier", SignalsTwice)
    assert "must be zero" in fault_of(AllReduce(Topology.virtual(2), 1, 128, schedule=0))


@pytest.mark.parametrize("topology", [Topology.virtual(2), Topology.virtual(8)])
def test_one_rank_that_sums_in_another_order_is_caught(monkeypatch, topology):
    def order_of_rank_1(blocks):
        backwards = sum_in_order(blocks[::-1])
        return jnp.where(lax.axis_index("ranks") == 1, backwards, sum_in_order(blocks))

    comm = AllReduce(topology, 1, 256, jnp.float32, schedule=0)
    terms = wide_range((topology.ranks, 1, 1, 256))
    right = repeated(comm, 1).interpret(terms).check()[0]
    assert all(np.array_equal(held, right[0]) for held in right)
    monkeypatch.setitem(comm.__dict__, "_chain", replace(comm._chain, combine=order_of_rank_1))
    wrong = repeated(comm, 1).interpret(terms).check()[0]
    same = [np.array_equal(held, right[0]) for held in wrong]
    # Two terms commute; only from three on does the order show.
    assert same == [rank != 1 or topology.ranks == 2 for rank in range(topology.ranks)]


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rank_that_does_not_round_its_own_term_is_caught(monkeypatch, ranks):
    monkeypatch.setattr("tpu_collectives.chain.Exchange", KeepsItsOwnTerm)
    comm = AllReduce(Topology.virtual(ranks), 1, 256, schedule=0)
    (sums,) = repeated(comm, 1).interpret(wide_range((ranks, 1, 1, 256))).check()
    assert not all(np.array_equal(held, sums[0]) for held in sums)


def missing_signal(muted):
    """Run in a process of its own: with ``muted``, the barrier waits for ever."""
    if muted:
        Barrier.signal = lambda self: pltpu.get_barrier_semaphore()
    comm = AllReduce(Topology.virtual(2), 1, 128)
    repeated(comm, 1).interpret(wide_range((2, 1, 1, 128))).check()


@pytest.mark.parametrize(
    ("muted", "timeout_s", "status"), [(False, 100, "passed"), (True, 10, "hung")]
)
def test_a_kernel_that_waits_for_ever_is_stopped(muted, timeout_s, status):
    target = f"{Path(__file__)}:missing_signal"
    outcome = run_isolated(target, 2, timeout_s, muted=muted)
    assert outcome.status == status, outcome.output
