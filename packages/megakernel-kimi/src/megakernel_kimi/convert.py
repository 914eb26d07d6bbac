"""``python -m megakernel_kimi.convert CHECKPOINT FOLDER --ranks N`` packs a checkpoint on disk.

What it writes loads without packing, each rank's file as fast as it can be read. Run again after
it was stopped, it goes on.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from kda_mla_kernels.errors import CheckpointError, ConfigError
from kda_mla_kernels.moe.kernel import ExpertForm
from kda_mla_kernels.numerics import BF16, F32
from vmem_pool.container import WriteOptions, file_name, open_container, print_dry_run

from megakernel_kimi.checkpoint import check_tensors
from megakernel_kimi.config import KimiConfig
from megakernel_kimi.container import (
    ConvertedFolder,
    Target,
    check_folder,
    convert,
    open_source,
)
from megakernel_kimi.container.origin import origin_of
from megakernel_kimi.layout import KimiLayout

__all__ = ["main"]

POLICIES = {policy.name: policy for policy in (BF16, F32)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 1 if the checkpoint cannot be converted."""
    chosen = _parser().parse_args(arguments)
    try:
        _run(chosen)
    except (ValueError, OSError) as error:  # all say in a sentence what is wrong
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _run(chosen: argparse.Namespace) -> None:
    if chosen.only_ranks is not None and chosen.only_ranks[-1] >= chosen.ranks:
        raise ConfigError(
            f"--only-ranks asks for rank {chosen.only_ranks[-1]}, but --ranks {chosen.ranks} are"
            " counted from 0"
        )
    checkpoint = open_source(chosen.checkpoint, chosen.revision, progress=True)
    if isinstance(checkpoint, ConvertedFolder):
        raise CheckpointError(
            f"{checkpoint.folder} is a converted folder; name the checkpoint to convert"
        )
    config = KimiConfig.from_dict(checkpoint.config)
    layout = KimiLayout.of(config, chosen.ranks, lanes=chosen.lanes, expert_tp=chosen.expert_tp)
    target = Target.of(layout, POLICIES[chosen.numerics], chosen.form)
    if chosen.dry_run:
        check_tensors(checkpoint, config)
        check_folder(chosen.folder, checkpoint)
        print_dry_run(chosen.folder, target.spec(origin_of(checkpoint, config)))
        return
    convert(checkpoint, chosen.folder, target, WriteOptions(chosen.only_ranks, progress=True))
    if all((chosen.folder / file_name(rank)).exists() for rank in range(layout.ranks)):
        open_container(chosen.folder)  # finds files of other sizes
        print(f"{chosen.folder} is complete: load it like a checkpoint, on {layout.ranks} devices")
    else:
        print(f"{chosen.folder} still lacks files of other ranks")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megakernel_kimi.convert",
        description="Writes the weights of every rank as the kernel reads them; resumable.",
    )
    parser.add_argument("checkpoint", help="folder or Hugging Face repository")
    parser.add_argument(
        "folder", type=_folder, help="where to write; it then stands for the checkpoint"
    )
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="devices")
    parser.add_argument(
        "--lanes", type=int, metavar="N", help="devices of a host (default: at most 8)"
    )
    parser.add_argument(
        "--expert-tp", type=int, metavar="N", help="ranks that share an expert (default: the most)"
    )
    parser.add_argument(
        "--form",
        choices=get_args(ExpertForm),
        default="mxfp4",
        help="of gate and up of experts (default: %(default)s)",
    )
    parser.add_argument(
        "--numerics",
        choices=POLICIES,
        default=BF16.name,
        help="policy to load with (default: %(default)s)",
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a repository")
    parser.add_argument(
        "--only-ranks",
        type=_ranks,
        metavar="A-B",
        help="write the files of these ranks only, B included; others may write the others",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show sizes and free space, write nothing"
    )
    return parser


def _folder(text: str) -> Path:
    if not text.strip():  # "$FOLDER" with an empty FOLDER must not be the working directory
        raise argparse.ArgumentTypeError(f"must be text that is not empty, not {text!r}")
    return Path(text).expanduser()


def _ranks(text: str) -> range:
    numbers = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text)
    if numbers is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a rank, such as 3, or a first and a last one, such as 0-7"
        )
    first, last = int(numbers[1]), int(numbers[2] or numbers[1])
    if last < first:
        raise argparse.ArgumentTypeError(
            f"{text!r} holds no rank, since the first comes after the last: {last}-{first} does"
        )
    return range(first, last + 1)


if __name__ == "__main__":
    sys.exit(main())
