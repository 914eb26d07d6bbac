"""Walks a jaxpr with its scalars evaluated, and counts operations on the way.

This reads jax's internal form of a kernel, which no version promises to keep; the tests hold it on
both supported lines.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from vmem_pool.aot.inventory import Inventory, Site

__all__ = ["TRACKED", "Walker", "inner", "jaxpr_of", "opened", "size_of", "source_line", "space_of"]

TRACKED = ("dma_start", "dma_wait", "semaphore_signal", "semaphore_wait")
STEERING = (*TRACKED, "pallas_call", "run_scoped", "while")
"""Equations that are walked whatever their results are."""
UNCHANGED = (
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "multiple_of",
    "reshape",
    "squeeze",
    "stop_gradient",
)
SCALARS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "add": operator.add,
    "and": operator.and_,
    "clamp": lambda low, x, high: max(low, min(x, high)),
    "div": lambda a, b: int(a / b),
    "eq": operator.eq,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "max": max,
    "min": min,
    "mul": operator.mul,
    "ne": operator.ne,
    "neg": operator.neg,
    "not": lambda a: not a if isinstance(a, bool) else ~a,
    "or": operator.or_,
    "rem": lambda a, b: int(math.fmod(a, b)),
    "select_n": lambda which, *cases: cases[int(which)],
    "shift_left": operator.lshift,
    "shift_right_arithmetic": operator.rshift,
    "sign": lambda a: (a > 0) - (a < 0),
    "sub": operator.sub,
    "xor": operator.xor,
    **dict.fromkeys(UNCHANGED, lambda a: a),
}


class Walker:
    """Evaluates scalars, of which None is unknown, and counts what is tracked in ``found``."""

    def __init__(self, axes: Mapping[str, int], unknown_trips: int) -> None:
        self.axes, self.unknown_trips, self.found = axes, unknown_trips, Inventory()
        self._sites: dict[int, Site] = {}
        self._tracks = functools.cache(self._tracks_uncached)
        self._steers = functools.cache(self._steers_uncached)
        self._lively = functools.cache(self._lively_uncached)

    def run(
        self,
        jaxpr: Any,
        arguments: Sequence[Any],
        nest: str,
        grid: tuple[int, ...],
        constants: Mapping[Any, Any] | None = None,
    ) -> list[Any]:
        """Walks one jaxpr; returns the scalars among its results."""
        known = dict(zip(opened(jaxpr).invars, arguments)) | dict(constants or {})

        def read(atom: Any) -> Any:
            if not hasattr(atom, "val"):
                return known.get(atom)
            return None if atom.aval.shape else getattr(atom.val, "item", lambda: atom.val)()

        for eqn in self._lively(opened(jaxpr)):
            values = self._equation(eqn, [read(atom) for atom in eqn.invars], nest, grid)
            known.update(zip(eqn.outvars, values))
        return [read(atom) for atom in opened(jaxpr).outvars]

    def _lively_uncached(self, jaxpr: Any) -> tuple[Any, ...]:
        """Equations with anything to count or to evaluate. The arithmetic of vectors is most of a
        kernel, and would be walked once for each turn of its loops."""
        return tuple(eqn for eqn in jaxpr.eqns if self._is_lively(eqn))

    def _is_lively(self, eqn: Any) -> bool:
        if eqn.primitive.name in STEERING or any(map(self._steers, inner(eqn))):
            return True
        return any(not getattr(result.aval, "shape", ()) for result in eqn.outvars)

    def _steers_uncached(self, jaxpr: Any) -> bool:
        return any(
            eqn.primitive.name in STEERING or any(map(self._steers, inner(eqn)))
            for eqn in opened(jaxpr).eqns
        )

    def _tracks_uncached(self, jaxpr: Any) -> bool:
        return any(
            eqn.primitive.name in (*TRACKED, "pallas_call") or any(map(self._tracks, inner(eqn)))
            for eqn in opened(jaxpr).eqns
        )

    def _equation(
        self, eqn: Any, arguments: list[Any], nest: str, grid: tuple[int, ...]
    ) -> list[Any]:
        name, unknown = eqn.primitive.name, [None] * len(eqn.outvars)
        scalar = None not in arguments and not any(atom.aval.shape for atom in eqn.invars)
        if name in TRACKED:
            self._count(eqn, nest)
        elif name == "program_id":
            axis = eqn.params["axis"]
            return [grid[axis] if axis < len(grid) else None]
        elif name == "axis_index":
            return [self.axes.get(eqn.params["axis_name"])]
        elif name in SCALARS and scalar:
            return [SCALARS[name](*arguments)]
        elif name == "pallas_call":
            self._pallas_call(eqn, nest)
        elif name == "cond":
            return self._cond(eqn, arguments, nest, grid)
        elif name in ("while", "scan"):
            if any(map(self._tracks, inner(eqn))):
                loop = self._while if name == "while" else self._scan
                return loop(eqn, arguments, nest, grid)
        else:
            return self._call(eqn, arguments, nest, grid)
        return unknown

    def _call(self, eqn: Any, arguments: list[Any], nest: str, grid: tuple[int, ...]) -> list[Any]:
        """Anything else that holds jaxprs, such as a jitted function."""
        results: list[Any] = [None] * len(eqn.outvars)
        for jaxpr in inner(eqn):
            passed_on = len(opened(jaxpr).invars) == len(arguments)
            passed_on &= eqn.primitive.name != "run_scoped"
            found = self.run(jaxpr, arguments if passed_on else [], nest, grid)
            if passed_on and len(found) == len(results):
                results = found
        return results

    def _either(self, ways: Sequence[Callable[[], list[Any]]]) -> list[Any]:
        """Walks alternatives of which one happens; results that they agree on stay known."""
        outer, results, tallies = self.found, [], []
        for way in ways:
            self.found = Inventory({}, outer.unknown)
            results.append(way())
            tallies.append(self.found.counts)
        self.found = outer
        for site in dict.fromkeys(itertools.chain(*tallies)):
            lows, highs = zip(*(tally.get(site, (0, 0)) for tally in tallies))
            outer.add(site, min(lows), max(highs))
        return [values[0] if len(set(map(repr, values))) == 1 else None for values in zip(*results)]

    def _cond(self, eqn: Any, arguments: list[Any], nest: str, grid: tuple[int, ...]) -> list[Any]:
        branches, which = eqn.params["branches"], arguments[0]
        taken = branches if which is None else branches[int(which) :][:1]
        inside = f"{nest}/if?" if which is None else f"{nest}/if"
        return self._either(
            [functools.partial(self.run, b, arguments[1:], inside, grid) for b in taken]
        )

    def _scan(self, eqn: Any, arguments: list[Any], nest: str, grid: tuple[int, ...]) -> list[Any]:
        params = eqn.params
        if "ft_in" in params:
            consts, carried = map(len, params["ft_in"].unpack()[:2])
        else:
            consts, carried = params["num_consts"], params["num_carry"]
        fixed, carry = arguments[:consts], arguments[consts : consts + carried]
        inside = f"{nest}/for[{params['length']}]"
        for _ in range(params["length"]):
            carry = self.run(params["jaxpr"], fixed + carry, inside, grid)[:carried]
        return carry + [None] * (len(eqn.outvars) - carried)

    def _while(self, eqn: Any, arguments: list[Any], nest: str, grid: tuple[int, ...]) -> list[Any]:
        test, body, carried = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"], len(eqn.outvars)
        test_consts = len(opened(test).invars) - carried
        split = len(arguments) - carried
        fixed, carry = arguments[test_consts:split], arguments[split:]
        while goes_on := self.run(test, arguments[:test_consts] + carry, nest, grid)[0]:
            carry = self.run(body, fixed + carry, f"{nest}/while", grid)
        if goes_on is not None:
            return carry
        self.found.unknown.add(f"{source_line(eqn)}{nest}/while")

        def some_trips() -> list[Any]:
            for _ in range(self.unknown_trips):
                self.run(body, fixed, f"{nest}/while[?]", grid)
            return []

        self._either([list, some_trips])
        return [None] * carried

    def _pallas_call(self, eqn: Any, nest: str) -> None:
        mapping, kernel = eqn.params["grid_mapping"], eqn.params["jaxpr"]
        inside = f"{nest}/{eqn.params.get('name') or kernel.debug_info.func_name}"
        sizes = [size if isinstance(size, int) else self.unknown_trips for size in mapping.grid]
        steps = list(itertools.product(*map(range, sizes)))

        def run() -> list[Any]:
            for site, moves in self._blocks(mapping, steps, inside):
                self.found.add(site, moves, moves)
            for step in steps:
                self.run(kernel, [], f"{inside}/grid{sizes}" if step else inside, step)
            return []

        static = sizes == list(mapping.grid)
        self._either([run] if static else [list, run])
        if not static:
            self.found.unknown.add(f"{inside}/grid")

    def _blocks(
        self, mapping: Any, steps: Sequence[tuple[int, ...]], nest: str
    ) -> Iterator[tuple[Site, int]]:
        """Transfers that a grid makes by itself: one whenever a block's index changes."""
        first_output = len(mapping.block_mappings) - mapping.num_outputs
        for number, block in enumerate(mapping.block_mappings):
            aval = block.transformed_block_aval
            if space_of(aval) in ("hbm", "any", "semaphore"):
                continue
            at = [self.run(block.index_map_jaxpr, step, "", step) for step in steps]
            changes = [i for i, a in enumerate(at) if not i or a != at[i - 1] or None in a]
            route = "hbm->vmem" if number < first_output else "vmem->hbm"
            yield Site("block", f"{route} #{number}", *size_of(aval), "", nest), len(changes)

    def _count(self, eqn: Any, nest: str) -> None:
        self.found.add(self._site(eqn)._replace(nest=nest))

    def _site(self, eqn: Any) -> Site:
        """What is the same each time an equation runs; the jaxpr that is walked keeps it alive."""
        if id(eqn) not in self._sites:
            self._sites[id(eqn)] = _site_of(eqn)
        return self._sites[id(eqn)]


def _site_of(eqn: Any) -> Site:
    name, avals = eqn.primitive.name, [atom.aval for atom in eqn.invars]
    if not name.startswith("dma"):
        device = jax.tree.unflatten(eqn.params["args_tree"], avals)[3:4]
        remote = name == "semaphore_signal" and any(d is not None for d in device)
        return Site(name, "remote" if remote else "local", "", 0, source_line(eqn), "")
    source, destination, _, _, device = eqn.params["tree"].unflatten(avals)
    to = ("remote " if device is not None else "") + space_of(destination)
    route = f"{space_of(source)}->{to}"
    return Site(name, route, *size_of(destination), source_line(eqn), "")


def jaxpr_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """The jaxpr of a function, jitted or not.

    A jitted function with compiler options of its own refuses to be traced inside another trace.
    """
    if hasattr(function, "trace"):
        return function.trace(*arguments).jaxpr
    return jax.make_jaxpr(function)(*arguments)


def opened(jaxpr: Any) -> Any:
    """A ``ClosedJaxpr``, as jax before 0.12 nests them, or a ``Jaxpr``."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def inner(eqn: Any) -> list[Any]:
    """The jaxprs in an equation's parameters."""
    params = [v if isinstance(v, tuple | list) else [v] for v in eqn.params.values()]
    return [value for value in itertools.chain(*params) if hasattr(opened(value), "eqns")]


def space_of(ref: Any) -> str:
    """Memory space of a reference or its type, such as "hbm"."""
    space = getattr(getattr(ref, "ref", ref), "memory_space", None)
    return str(getattr(space, "value", space)).removesuffix("_mem")


def size_of(aval: Any) -> tuple[str, int]:
    """Shape as text, and bytes without padding; an unknown size counts as 1."""
    bits = int((re.findall(r"\d+", str(aval.dtype)) or ["8"])[0])
    sizes = [size if isinstance(size, int) else "?" for size in aval.shape]
    known = math.prod(size for size in sizes if isinstance(size, int))
    return f"{aval.dtype}{sizes}", known * bits // 8


def source_line(eqn: Any) -> str:
    """Where the user's code made an equation, as "file.py:line"."""
    from jax._src import source_info_util

    frame = source_info_util.user_frame(eqn.source_info.traceback)
    return f"{os.path.basename(frame.file_name)}:{frame.start_line}" if frame else ""
