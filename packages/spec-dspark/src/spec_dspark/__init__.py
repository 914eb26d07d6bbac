"""Lossless speculative decoding: verification, and the DSpark and DFlash2 drafters."""

from importlib.metadata import version as _version

from spec_dspark.drafter import Drafter, Proposal
from spec_dspark.loop import Generated, Request, generate, stream
from spec_dspark.prompt_lookup import PromptLookup
from spec_dspark.rounds import Live, Round, run_round
from spec_dspark.verification import Accepted, accept, accept_greedy

__all__ = [
    "Accepted",
    "Drafter",
    "Generated",
    "Live",
    "PromptLookup",
    "Proposal",
    "Request",
    "Round",
    "__version__",
    "accept",
    "accept_greedy",
    "generate",
    "run_round",
    "stream",
]

__version__ = _version("spec-dspark")
