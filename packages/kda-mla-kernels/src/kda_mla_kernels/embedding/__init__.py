"""Rows of an embedding table that is cut over ranks."""

from kda_mla_kernels.embedding.kernel import EmbeddingRows, EmbeddingScratch, table_rows

__all__ = ["EmbeddingRows", "EmbeddingScratch", "table_rows"]
