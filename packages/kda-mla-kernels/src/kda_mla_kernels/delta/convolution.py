"""The short causal convolution before the delta rule.

Letters: S sequences, T tokens, W taps, C channels. Source: the Qwen3.5 and Kimi K3
modelling code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from kda_mla_kernels.numerics import Numerics

__all__ = ["causal_convolution", "convolve", "tail_rows", "token_windows"]


def tail_rows(taps: int) -> int:
    """Rows of memory for the W-1 inputs that a convolution remembers: a power of two, up to which
    a TPU's tiles pad anyway."""
    return 1 << (taps - 2).bit_length()


def token_windows(line: jax.Array, taps: int) -> jax.Array:
    """What each token's convolution sees.

    Args:
        line: [S, W-1+T, C] the inputs before the first token, oldest first (zeros at the start),
            then those of the T tokens.
        taps: W.

    Returns:
        [S, T, W, C], oldest first.
    """
    tokens = line.shape[1] - taps + 1
    return jnp.stack([line[:, j : j + tokens] for j in range(taps)], axis=2)


def convolve(windows: jax.Array, taps: jax.Array, numerics: Numerics) -> jax.Array:
    """Depthwise convolution of each token's window, then SiLU; one rounding at the end.

    ``y = silu(Σ_j taps[j] · window[j])``: the last tap multiplies the current token.

    Args:
        windows: [..., W, C]. taps: [W, C].

    Returns:
        [..., C] in the activation dtype.
    """
    wide, weights = windows.astype(jnp.float32), taps.astype(jnp.float32)
    total = sum(weights[j] * wide[..., j, :] for j in range(taps.shape[0]))
    return numerics.round(jax.nn.silu(total))


def causal_convolution(
    tail: jax.Array, inputs: jax.Array, taps: jax.Array, numerics: Numerics
) -> jax.Array:
    """The short convolution of whole sequences: tail [S, W-1, C], inputs [S, T, C] -> [S, T, C]."""
    line = jnp.concatenate([tail, inputs], axis=1)
    return convolve(token_windows(line, taps.shape[0]), taps, numerics)
