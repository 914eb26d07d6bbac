"""Compiles one target and prints what it learnt as a line of JSON.

A process of its own, because compiler flags are read once, and because some mistakes make the
compiler abort its process.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

from vmem_pool.aot.inventory import take_inventory
from vmem_pool.aot.target import load

__all__ = ["main"]


def main() -> int:
    """Reads target, topology and mesh coordinates from one JSON argument."""
    request = json.loads(sys.argv[1])
    print(json.dumps(_compile(request["target"], request["topology"], request["axes"])))
    return 0


def _compile(target: str, topology: str, axes: dict[str, int]) -> dict[str, Any]:
    try:
        function, arguments = load(target, topology)
        inventory = take_inventory(function, *arguments, axis_index=axes)
        lowered = function.lower(*arguments)
        start = time.perf_counter()
        compiled = lowered.compile()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    return {
        "compile_seconds": seconds,
        "memory": {key: getattr(memory, key) for key in dir(memory) if key.endswith("_in_bytes")},
        "custom_calls": len(re.findall(r'custom_call_target="tpu_custom_call"', text)),
        "copies": len(re.findall(r"= [^=\n]*\bcopy(?:-start)?\(", text)),
        "inventory": inventory.to_json(),
    }


if __name__ == "__main__":
    sys.exit(main())
