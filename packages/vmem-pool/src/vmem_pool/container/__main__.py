"""``python -m vmem_pool.container FOLDER [--full]`` shows and verifies a container."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vmem_pool.container.reader import Verify, open_container
from vmem_pool.container.show import print_spec
from vmem_pool.errors import ContainerError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 1 if the container is not sound."""
    parser = argparse.ArgumentParser(
        prog="python -m vmem_pool.container", description="Shows and verifies a container."
    )
    parser.add_argument("folder")
    parser.add_argument("--full", action="store_true", help="read everything, compare checksums")
    chosen = parser.parse_args(arguments)
    verify = Verify.FULL if chosen.full else Verify.FAST
    try:
        found = open_container(chosen.folder, verify=verify)
    except ContainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_spec(found.spec)
    print(f"sound: {verify.value} agree with the manifest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
