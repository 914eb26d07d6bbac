"""What every model package's backend needs and no model owns.

A model package brings its layout, its weights and a subclass of :class:`Programs` that says what
its layers do to a :class:`Batch` on one rank. From here come the programs around that, the model
protocol over them with its checks, the state of linear attentions, rows of the state, options of
loading, and embedding and logits over a vocabulary that is cut over ranks.
"""

from kda_mla_kernels.backend.abstract import AbstractModel, AbstractProgram
from kda_mla_kernels.backend.batch import Batch
from kda_mla_kernels.backend.choice import chosen_kernel
from kda_mla_kernels.backend.kernel_programs import (
    KernelPrograms,
    StepResult,
    VerifyRecords,
    interpreter_for,
)
from kda_mla_kernels.backend.memory import (
    Carry,
    ChunkRule,
    DeltaCaches,
    DeltaRecords,
    Memory,
    Slot,
    Window,
    no_records,
)
from kda_mla_kernels.backend.model import BackendModel, BackendState
from kda_mla_kernels.backend.options import (
    MAX_CHUNK,
    LoadOptions,
    cache_slots,
    choose_devices,
    whole_number,
)
from kda_mla_kernels.backend.placing import Track, held_dtype, place, progress_bar, untracked
from kda_mla_kernels.backend.positions import HeldPositions, write_positions
from kda_mla_kernels.backend.programs import Fed, Passed, Programs
from kda_mla_kernels.backend.ranks import RANKS, SPLIT, WHOLE, sum_over_ranks
from kda_mla_kernels.backend.reading import ShareReader
from kda_mla_kernels.backend.share import Share
from kda_mla_kernels.backend.step_plan import CANDIDATES, StepPlan
from kda_mla_kernels.backend.vocabulary import embed, gather_logits

__all__ = [
    "CANDIDATES",
    "MAX_CHUNK",
    "RANKS",
    "SPLIT",
    "WHOLE",
    "AbstractModel",
    "AbstractProgram",
    "BackendModel",
    "BackendState",
    "Batch",
    "Carry",
    "ChunkRule",
    "DeltaCaches",
    "DeltaRecords",
    "Fed",
    "HeldPositions",
    "KernelPrograms",
    "LoadOptions",
    "Memory",
    "Passed",
    "Programs",
    "Share",
    "ShareReader",
    "Slot",
    "StepPlan",
    "StepResult",
    "Track",
    "VerifyRecords",
    "Window",
    "cache_slots",
    "choose_devices",
    "chosen_kernel",
    "embed",
    "gather_logits",
    "held_dtype",
    "interpreter_for",
    "no_records",
    "place",
    "progress_bar",
    "sum_over_ranks",
    "untracked",
    "whole_number",
    "write_positions",
]
