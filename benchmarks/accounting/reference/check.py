"""How far the model is from what others measured."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.accounting.program import Program
from benchmarks.accounting.reference import qwen
from benchmarks.accounting.simulation import simulate

__all__ = ["TOLERANCE", "Check", "check_qwen"]

TOLERANCE = 0.15


@dataclass(frozen=True)
class Check:
    """A published time and what the model says of its schedule.

    Attributes:
        name: of the published kernel.
        parts: simulated us by kernel.
        published_us: measured by its authors.
    """

    name: str
    parts: dict[str, float]
    published_us: float

    @property
    def simulated_us(self) -> float:
        """All parts."""
        return sum(self.parts.values())

    @property
    def error(self) -> float:
        """Of the model: negative if it promises too much."""
        return self.simulated_us / self.published_us - 1

    @property
    def sentence(self) -> str:
        """For people."""
        parts = " + ".join(f"{name} {us / 1e3:.3f}" for name, us in self.parts.items())
        verdict = "inside" if abs(self.error) <= TOLERANCE else "outside"
        return (
            f"Reference check, {self.name}: simulated {self.simulated_us / 1e3:.3f} ms ({parts}),"
            f" published {self.published_us / 1e3:.3f} ms: {self.error:+.1%}, {verdict} the"
            f" {TOLERANCE:.0%} that a prediction may be trusted for."
        )


def check_qwen(position: int = 512) -> Check:
    """The published Qwen round at the mean position of its benchmark's thousand tokens."""
    programs: list[Program] = [
        qwen.verify(position),
        qwen.draft(position),
        qwen.select_snapshot(),
    ]
    parts = {program.name.split()[-1]: simulate(program).us for program in programs}
    return Check("Qwen round of 8 rows", parts, qwen.PUBLISHED_US)
