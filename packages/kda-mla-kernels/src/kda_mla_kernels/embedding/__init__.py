"""Rows of an embedding table that is cut over ranks."""

from kda_mla_kernels.embedding.kernel import TABLE_ROWS, EmbeddingRows, EmbeddingScratch

__all__ = ["TABLE_ROWS", "EmbeddingRows", "EmbeddingScratch"]
