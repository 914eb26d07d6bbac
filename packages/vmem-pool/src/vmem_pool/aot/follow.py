"""Walks a kernel's jaxpr as it would run: known scalars, one branch at a time, every iteration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vmem_pool.aot.events import Event, Semaphore, Trace, TraceError
from vmem_pool.aot.inventory import Site
from vmem_pool.aot.walker import TRACKED, Walker, inner, opened, source_line

__all__ = ["Follower"]


@dataclass(frozen=True)
class _Reference:
    """A reference that is passed around in a kernel."""

    argument: int | None
    held: Any = None
    """its contents, as far as they are known"""


class Follower(Walker):
    """Appends what runs to ``events``; see :func:`vmem_pool.aot.trace_events`."""

    def __init__(self, kernel: str, axes: Mapping[str, int], contents: Mapping[int, Any]) -> None:
        super().__init__(axes, unknown_trips=0)
        self.kernel, self.contents = kernel, contents
        self.events: list[Event] = []
        self.traces: list[Trace] = []
        self.names: list[str] = []
        self.lengths: defaultdict[str, list[int]] = defaultdict(list)

    def trace(self, jaxpr: Any) -> Trace:
        """The first kernel of that name."""
        self.run(jaxpr, [], "", ())
        if not self.traces:
            known = ", ".join(self.names) or "none"
            raise TraceError(f"no kernel is called {self.kernel}... (there are: {known})")
        return self.traces[0]

    def _pallas_call(self, eqn: Any, nest: str) -> None:
        mapping, body = eqn.params["grid_mapping"], opened(eqn.params["jaxpr"])
        name = eqn.params.get("name") or body.debug_info.func_name
        self.names.append(name)
        if self.traces or not name.startswith(self.kernel):
            return
        if mapping.grid:
            raise TraceError(f"kernel {name} has a grid; only kernels without one are followed")
        references = [
            _Reference(i, self.contents.get(i)) if hasattr(v.aval, "inner_aval") else None
            for i, v in enumerate(body.invars)
        ]
        self.run(body, references, name, ())
        moved = {"hbm->vmem": 0, "vmem->hbm": 0}
        for site, times in self._blocks(mapping, [()], name):
            moved[site.route.partition(" ")[0]] += site.bytes * times
        self.traces.append(
            Trace(
                name,
                len(body.invars),
                tuple(self.events),
                moved["hbm->vmem"],
                moved["vmem->hbm"],
                trips={at: sum(n) / len(n) for at, n in self.lengths.items()},
            )
        )

    def _equation(
        self, eqn: Any, arguments: list[Any], nest: str, grid: tuple[int, ...]
    ) -> list[Any]:
        name = eqn.primitive.name
        if name in TRACKED:
            self.events.append(_event(eqn, arguments, self._site(eqn)))
            return [None] * len(eqn.outvars)
        if name == "get":
            return [_read(eqn, arguments)]
        if name == "run_scoped":
            (body,) = inner(eqn)
            fresh = [_Reference(None) for _ in opened(body).invars]
            return self.run(body, fresh, nest, grid, dict(zip(opened(body).constvars, arguments)))
        if name == "cond" and arguments[0] is None:
            if any(map(self._tracks, inner(eqn))):
                raise TraceError(f"which events run depends on data at {source_line(eqn)}{nest}")
            return [None] * len(eqn.outvars)
        if name == "while" and not any(map(self._tracks, inner(eqn))):
            return self._quiet_loop(eqn, arguments, nest, grid)
        return super()._equation(eqn, arguments, nest, grid)

    def _quiet_loop(
        self, eqn: Any, arguments: list[Any], nest: str, grid: tuple[int, ...]
    ) -> list[Any]:
        """Counts the turns of a loop without events, if its test depends on nothing unknown."""
        test, body, carried = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"], len(eqn.outvars)
        split, constants = len(arguments) - carried, eqn.params["cond_nconsts"]
        carry, turns = arguments[split:], 0
        while goes_on := self.run(test, arguments[:constants] + carry, nest, grid)[0]:
            carry = self.run(body, arguments[constants:split] + carry, nest, grid)
            turns += 1
        if goes_on is None:
            return [None] * carried
        self.lengths[source_line(eqn)].append(turns)
        return carry

    def _scan(self, eqn: Any, arguments: list[Any], nest: str, grid: tuple[int, ...]) -> list[Any]:
        self.lengths[source_line(eqn)].append(eqn.params["length"])
        return super()._scan(eqn, arguments, nest, grid)

    def _either(self, ways: Sequence[Callable[[], list[Any]]]) -> list[Any]:
        if len(ways) > 1:
            raise TraceError(f"a loop around events has a length that depends on data: {self._at}")
        return ways[0]()

    @property
    def _at(self) -> str:
        return ", ".join(sorted(self.found.unknown))


def _event(eqn: Any, arguments: list[Any], site: Site) -> Event:
    if not site.op.startswith("dma"):
        return _semaphore_event(eqn, arguments, site)
    read, written, arrived, sent, device = eqn.params["tree"].unflatten(arguments)
    return Event(
        op=site.op,
        source=site.source,
        semaphore=_semaphore(arrived),
        amount=site.bytes,
        route=site.route,
        device=_coordinates(device),
        sent=None if sent is None else _semaphore(sent),
        ends=(_argument(read), _argument(written)),
    )


def _semaphore_event(eqn: Any, arguments: list[Any], site: Site) -> Event:
    reference, transforms, amount, *rest = eqn.params["args_tree"].unflatten(arguments)
    device = rest[0] if site.op == "semaphore_signal" else None
    semaphore = Semaphore(getattr(reference, "argument", None), _indices(transforms))
    return Event(site.op, site.source, semaphore, amount, site.route, _coordinates(device))


def _semaphore(reference: Any) -> Semaphore:
    return Semaphore(_argument(reference), _indices(getattr(reference, "transforms", ())))


def _argument(reference: Any) -> int | None:
    """Number of the argument that a reference, maybe to a part of it, belongs to."""
    return getattr(getattr(reference, "ref", reference), "argument", None)


def _indices(transforms: Sequence[Any]) -> tuple[int, ...]:
    found = [at for transform in transforms for at in getattr(transform, "indices", ())]
    starts = [getattr(at, "start", at) for at in found]
    return tuple(-1 if at is None else int(at) for at in starts)


def _coordinates(device: Any) -> tuple[tuple[str, int | None], ...] | None:
    if device is None:
        return None
    known = device if isinstance(device, Mapping) else {"": device}
    return tuple((str(axis), None if at is None else int(at)) for axis, at in known.items())


def _read(eqn: Any, arguments: list[Any]) -> Any:
    """A scalar that is loaded from a reference whose contents are known."""
    held = getattr(arguments[0], "held", None)
    if held is None or eqn.outvars[0].aval.shape:
        return None
    (indexer,) = eqn.params["tree"].unflatten(arguments[1:]) or (None,)
    at = _indices([indexer]) if indexer is not None else ()
    return None if -1 in at else np.asarray(held)[at].item()
