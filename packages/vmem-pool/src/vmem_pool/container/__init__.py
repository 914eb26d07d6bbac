"""Weights on disk as they are streamed: one mappable file per rank, in consumption order."""

from vmem_pool.container.files import replacing
from vmem_pool.container.manifest import FileEntry, Manifest, read_manifest
from vmem_pool.container.reader import Container, Expected, Verify, open_container
from vmem_pool.container.show import print_dry_run, print_spec
from vmem_pool.container.spec import VERSION, Spec, Tensor, file_name
from vmem_pool.container.writer import Source, WriteOptions, remaining_bytes, write_container

__all__ = [
    "VERSION",
    "Container",
    "Expected",
    "FileEntry",
    "Manifest",
    "Source",
    "Spec",
    "Tensor",
    "Verify",
    "WriteOptions",
    "file_name",
    "open_container",
    "print_dry_run",
    "print_spec",
    "read_manifest",
    "remaining_bytes",
    "replacing",
    "write_container",
]
