"""What the accounting must know of each family of models, and nothing else knows."""

from benchmarks.accounting.families.family import Family, KernelCase, names_of, numbered
from benchmarks.accounting.families.kimi import KIMI
from benchmarks.accounting.families.qwen import QWEN

__all__ = ["FAMILIES", "Family", "KernelCase", "names_of", "numbered"]

FAMILIES: dict[str, Family] = {family.name: family for family in (QWEN, KIMI)}
