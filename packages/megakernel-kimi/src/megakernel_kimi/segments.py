"""The layers as few loops over repeated periods, so that a program's size does not follow theirs.

Kimi K3 has one dense layer, and attention kinds that repeat every four layers but for the last::

    layer 0          1 .. 88                      89 90       91 92
    KDA, dense       22 x (KDA KDA MLA KDA)       2 x (KDA)   2 x (MLA)
"""

from __future__ import annotations

from dataclasses import dataclass

from megakernel_kimi.config import KimiConfig, LayerKind

__all__ = ["LayerForm", "Segment", "segments"]


@dataclass(frozen=True)
class LayerForm:
    """What decides the code of a layer."""

    attention: LayerKind
    dense: bool


@dataclass(frozen=True)
class Segment:
    """``turns`` repetitions of a few layers."""

    first: int
    """layer"""
    forms: tuple[LayerForm, ...]
    """of one turn"""
    turns: int

    @property
    def period(self) -> int:
        """Layers of a turn."""
        return len(self.forms)

    def layers(self, member: int) -> range:
        """The layers that a member of the period stands for, turn after turn."""
        last = self.first + self.turns * self.period
        return range(self.first + member, last, self.period)


def _forms(config: KimiConfig) -> tuple[LayerForm, ...]:
    dense = set(config.dense_layers)
    return tuple(LayerForm(kind, i in dense) for i, kind in enumerate(config.layer_kinds))


def _turns(forms: tuple[LayerForm, ...], period: int) -> int:
    """How often the first ``period`` forms stand there in a row."""
    turns = 1
    while forms[turns * period : (turns + 1) * period] == forms[:period]:
        turns += 1
    return turns


def segments(config: KimiConfig) -> tuple[Segment, ...]:
    """Cuts the layers, each time taking what most layers repeat, with the shortest period."""
    forms, found, first = _forms(config), [], 0
    while first < len(forms):
        rest = forms[first:]
        repeated = [(period, _turns(rest, period)) for period in range(1, len(rest) // 2 + 1)]
        repeated = [(period, turns) for period, turns in repeated if turns > 1]
        best = max(repeated, key=lambda one: (one[0] * one[1], -one[0]), default=(1, 1))
        found.append(Segment(first, rest[: best[0]], best[1]))
        first += best[0] * best[1]
    return tuple(found)
