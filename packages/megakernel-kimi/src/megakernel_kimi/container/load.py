"""Mapping converted weights and putting them on the devices."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.sharding import Mesh
from kda_mla_kernels.backend import Track, place, untracked
from kda_mla_kernels.errors import CheckpointError
from vmem_pool import ContainerError
from vmem_pool.container import Verify

from megakernel_kimi.container.opened import Converted
from megakernel_kimi.container.target import Target
from megakernel_kimi.kernel.source import join_rows
from megakernel_kimi.kernel.weights import KernelWeights

__all__ = ["load_converted"]


def load_converted(
    converted: Converted, target: Target, mesh: Mesh, track: Track = untracked
) -> KernelWeights:
    """Loads the files of this process's ranks; each is compared with its checksum first.

    Args:
        converted: weights of which :meth:`Converted.check` approves.
        mesh: one axis, the ranks in order.
        track: wraps the loop over ranks, to show progress.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    own, process = [], jax.process_index()
    for rank, device in enumerate(mesh.devices.flat):
        if device.process_index == process:
            own.append(rank)
    done, container = iter(track(own, "weights")), converted.container
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing lets other threads run
        checks = {rank: pool.submit(container.verify, rank, Verify.FULL) for rank in own}

        def read(rank: int) -> KernelWeights:
            next(done, None)
            checks[rank].result()
            return join_rows(target.layout, target.shape, container.rank(rank))

        try:
            loaded = place(mesh, read)
        except ContainerError as error:
            raise CheckpointError(str(error)) from None
        finally:
            pool.shutdown(cancel_futures=True)
    next(done, None)
    return loaded
