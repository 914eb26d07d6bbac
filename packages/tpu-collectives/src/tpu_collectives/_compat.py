"""What differs between jax versions, or is not public."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any, Literal

import numpy as np
from jax.experimental.pallas import tpu as pltpu

__all__ = [
    "interpret_params",
    "pass_numpy_to_interpreter",
    "races_found",
    "reset_interpreter",
]

_INTERPRETER = "jax._src.pallas."


def interpret_params(detect_races: bool, dma: Literal["on_wait", "eager"]) -> Any:
    """Interpreter parameters that record races without raising in the middle of a callback."""
    options: dict[str, Any] = {}
    if any(field.name == "on_race" for field in fields(pltpu.InterpretParams)):
        # jax 0.12 raises by default, which leaves the other devices' threads waiting.
        options["on_race"] = "warn"
    return pltpu.InterpretParams(detect_races=detect_races, dma_execution_mode=dma, **options)


def races_found() -> bool:
    """Whether the last interpreted kernel raced; there is no public way to ask in jax 0.10."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races is not None and interpret_pallas_call.races.races_found


def reset_interpreter() -> None:
    """Forget the state that a failed kernel leaves behind."""
    pltpu.reset_tpu_interpret_mode_state()


@functools.cache
def pass_numpy_to_interpreter() -> None:
    """See :func:`tpu_collectives.interpreter.quicken_interpreter`."""
    from jax._src import callback as callbacks

    usual = getattr(callbacks, "io_callback_impl", None)
    if usual is None:
        return

    @functools.wraps(usual)
    def without_devices(*args: Any, callback: Any, **options: Any) -> Any:
        function = getattr(callback, "callback_func", None)
        while isinstance(function, functools.partial):
            function = function.func
        if not getattr(function, "__module__", "").startswith(_INTERPRETER):
            return usual(*args, callback=callback, **options)
        return [np.asarray(result) for result in callback(*args)]

    callbacks.io_callback_impl = without_devices
