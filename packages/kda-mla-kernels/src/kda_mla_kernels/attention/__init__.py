"""What the attention stages of kernels share: a cache streamed through VMEM, and its commit.

A token leaves a column in one array of the cache and a row in another; ``gqa.kernel`` holds keys
and values in them, ``mla.kernel`` shared key dims and latents.
"""
