"""How far the model is from what others measured."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.accounting.reference import kimi, qwen
from benchmarks.accounting.simulation import simulate

__all__ = ["TOLERANCE", "Check", "check_all", "check_kimi", "check_qwen"]

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


def check_all() -> list[Check]:
    """All published times whose schedules are described well enough."""
    return [check_qwen(), check_kimi()]


def check_qwen(position: int = 512) -> Check:
    """The published Qwen round at the mean position of its benchmark's thousand tokens."""
    programs = [qwen.verify(position), qwen.draft(position), qwen.select_snapshot()]
    parts = {program.name.split()[-1]: simulate(program).us for program in programs}
    return Check("Qwen round of 8 rows", parts, qwen.PUBLISHED_US)


def check_kimi(position: int = 512) -> Check:
    """The published Kimi K3 step at one row."""
    parts = {"step": simulate(kimi.step(position)).us, "head": simulate(kimi.head()).us}
    return Check("Kimi K3 step of 1 row", parts, kimi.PUBLISHED_US)
