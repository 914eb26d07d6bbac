"""The protocol between a model package and whoever drives it (a server, a drafter, a notebook).

A **model** owns weights and compiled programs; a **state** owns everything that a sequence leaves
behind: recurrent states, convolution tails, caches. The state has a fixed number of **rows**, one
sequence each. Every call that takes a state consumes it (buffers are donated) and returns the next
one: never use a state twice.

Positions count tokens of the sequence from 0. A row's recurrent state stands after the tokens
``0 .. p-1`` when the next token fed to it has position ``p``; feeding any other position gives
wrong results, which the model cannot notice, since positions are device values.

A model package makes itself known by an entry point in the group ``megakernel.models`` that names a
module (or object) with the attributes of :class:`ModelPackage`::

    [project.entry-points."megakernel.models"]
    qwen = "megakernel_qwen.package"

Letters: R rows of the state, S sequences of a call, T tokens of each, N tokens of a prefill chunk,
V vocabulary, F feature layers, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from kda_mla_kernels.errors import CheckpointError

if TYPE_CHECKING:
    import jax
    from tokenizers import Tokenizer

    from kda_mla_kernels.chat import ChatFormat
    from kda_mla_kernels.sampling import Sampling

__all__ = [
    "ENTRY_POINT_GROUP",
    "Decoded",
    "GenerationDefaults",
    "LoadsConverted",
    "Model",
    "ModelInfo",
    "ModelPackage",
    "Prefilled",
    "State",
    "Verified",
    "find_package",
    "package_for_model_type",
    "packages",
]

ENTRY_POINT_GROUP = "megakernel.models"

State: TypeAlias = Any
"""An opaque pytree, made by :meth:`Model.init_state` and consumed by every call that takes it."""


@dataclass(frozen=True)
class ModelInfo:
    """What a driver must know before it can plan work. All sizes are counts unless named."""

    family: str
    """Entry point name of the package, e.g. ``qwen``."""
    name: str
    """Repository or folder name, as shown to users."""
    backend: Literal["xla", "megakernel"]
    numerics: Literal["f32", "bf16"]
    ranks: int
    legal_ranks: tuple[int, ...]
    """Rank counts that this model can be split over."""
    vocab_size: int
    """Rows of the logits, padding rows of the table included."""
    hidden_size: int
    num_layers: int
    parameters: int
    weight_bytes: int
    """Bytes of all ranks together, as held in memory."""
    max_rows: int
    max_context: int
    """Positions that one row can hold: prompt and generated tokens together."""
    max_chunk: int
    """Most tokens of one prefill call."""
    feature_layers: tuple[int, ...]
    details: tuple[tuple[str, str], ...] = ()
    """What else its family says of how it was loaded, for people: names and values."""


@dataclass(frozen=True)
class GenerationDefaults:
    """A checkpoint's own sampling settings (``generation_config.json``)."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_ids: frozenset[int] = field(default_factory=frozenset)

    @classmethod
    def from_json(cls, found: Any, stop_ids: frozenset[int] = frozenset()) -> GenerationDefaults:
        """Reads the parsed file (None if there is none); null means unset.

        Sampling is on if ``do_sample`` says so or, without it, if a temperature is given.

        Args:
            stop_ids: further ids that end an answer.

        Raises:
            CheckpointError: not an object, or a value of the wrong type or outside its range.
        """
        if not isinstance(found, Mapping | None):
            raise CheckpointError("generation_config.json must hold an object")
        given = {name: value for name, value in (found or {}).items() if value is not None}
        sampled = given.get("do_sample", "temperature" in given)
        if not isinstance(sampled, bool):
            raise CheckpointError(
                f"generation_config.json: do_sample {sampled!r} must be a boolean"
            )
        values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        values |= {name: given[name] for name in values if name in given}
        for name, value in values.items():
            kinds = int if name == "top_k" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise CheckpointError(f"generation_config.json: {name} {value!r} must be a number")
        # Here, so that a command line can look up packages without loading jax.
        from kda_mla_kernels.sampling import SamplingParams

        try:
            SamplingParams(**values)
        except ValueError as error:
            raise CheckpointError(f"generation_config.json: {error}") from None
        given_ends = given.get("eos_token_id", [])
        ends = given_ends if isinstance(given_ends, list) else [given_ends]
        if any(isinstance(end, bool) or not isinstance(end, int) or end < 0 for end in ends):
            raise CheckpointError(
                "generation_config.json: eos_token_id must be an id or a list of ids,"
                f" not {given_ends!r}"
            )
        if not sampled:
            values["temperature"] = 0.0
        return cls(**values, stop_ids=frozenset(ends) | stop_ids)


class Prefilled(NamedTuple):
    """Result of one prefill chunk."""

    logits: jax.Array
    """f32 [V] after the last token, or [N, V] when ``all_logits`` was asked for."""
    features: jax.Array
    """[N, F, D] residual stream after each feature layer."""
    state: State


class Decoded(NamedTuple):
    """Result of one decode step."""

    tokens: jax.Array
    """i32 [R], the chosen next token of each row; -1 where the row was not active."""
    logits: jax.Array | None
    """f32 [R, V] if asked for, else None."""
    state: State


class Verified(NamedTuple):
    """Result of a verify step. ``state`` holds replay records until :meth:`Model.commit`."""

    logits: jax.Array
    """f32 [S, T, V]; entry t is the distribution after token t."""
    features: jax.Array
    """[S, T, F, D]."""
    state: State


@runtime_checkable
class Model(Protocol):
    """A loaded model. Methods may be called from one thread at a time."""

    info: ModelInfo
    generation: GenerationDefaults
    chat_format: ChatFormat | None
    """None if the checkpoint has no tokenizer."""
    tokenizer: Tokenizer | None
    """None if the checkpoint has none: then only token ids go in and out."""

    def init_state(self) -> State:
        """A state whose R rows are all empty (position 0)."""
        ...

    def prefill(
        self, state: State, row: int, tokens: Sequence[int], start: int, *, all_logits: bool = False
    ) -> Prefilled:
        """Feeds 1..``max_chunk`` tokens of a prompt to one row, the first at position ``start``.

        Chunks of any size in any sequence give the same result as one whole chunk, up to the
        rounding of the numerics policy.

        Raises:
            ValueError: no tokens, more than ``max_chunk``, an id outside the vocabulary, a row
                outside the state, ``start + N`` beyond the context, or records not yet committed.
        """
        ...

    def decode(
        self,
        state: State,
        tokens: Sequence[int] | jax.Array,
        positions: Sequence[int] | jax.Array,
        active: Sequence[bool],
        sampling: Sampling | None = None,
        *,
        with_logits: bool = False,
    ) -> Decoded:
        """One step: feeds one token to each active row and chooses the next ones.

        ``tokens``, ``positions`` and ``active`` have R entries. Rows that are not active keep
        their state, bit for bit. ``sampling=None`` is greedy: the lowest id of the largest logit.
        A row's result does not depend on the other rows. Tokens and positions may be device arrays
        (the tokens of the step before, say); their values are then not checked.

        Raises:
            ValueError: not R entries, an id outside the vocabulary or a position outside the
                context in an active row, or records not yet committed.
        """
        ...

    def verify(
        self,
        state: State,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        positions: Sequence[int],
    ) -> Verified:
        """Judges T tokens of each of S sequences at once, without moving their recurrent state.

        ``rows`` [S] are distinct rows of the state; ``tokens`` [S, T] hold the last chosen token
        and the drafts; ``positions`` [S] belong to the first token of each sequence. S·T is at
        most R (``max_rows``). Must be followed by :meth:`commit`.

        Raises:
            ValueError: shapes that do not match, too many tokens, equal rows, a row, id or position
                out of range, or records not yet committed.
        """
        ...

    def commit(self, state: State, accepted: Sequence[int] | jax.Array) -> State:
        """Moves each verified sequence by its first ``accepted[s]`` tokens (0..T).

        The state is then what feeding these tokens one by one would have left.

        Raises:
            ValueError: nothing was verified, not S counts, or a count outside 0..T.
        """
        ...

    def reset(self, state: State, row: int) -> State:
        """Empties a row, for a new sequence.

        Raises:
            ValueError: a row outside the state, or records not yet committed.
        """
        ...

    def snapshot(self, state: State, row: int, length: int) -> Any:
        """A copy of a row that stands at position ``length``. Does not consume the state.

        Raises:
            ValueError: a row or length out of range, or records not yet committed.
        """
        ...

    def restore(self, state: State, row: int, snap: Any) -> State:
        """Puts a snapshot into any row of a state of the same model.

        Raises:
            ValueError: a row outside the state, or records not yet committed.
        """
        ...


@runtime_checkable
class ModelPackage(Protocol):
    """What an entry point of ``megakernel.models`` refers to. Importing it touches no device."""

    family: str
    model_types: frozenset[str]
    """Values of ``model_type`` in ``config.json`` that this package loads."""
    default_repo: str
    """Hugging Face repository of the family's main checkpoint."""
    variable_prefix: str
    """Prefix of the family's environment variables, e.g. ``QWEN``."""

    def embedded_checkpoint(self) -> Path:
        """Folder of the tiny checkpoint that ships with the package.

        Raises:
            kda_mla_kernels.errors.CheckpointError: the package ships none.
        """
        ...

    def load(
        self,
        checkpoint: str | Path,
        *,
        revision: str | None = None,
        devices: Sequence[jax.Device] | None = None,
        backend: Literal["auto", "xla", "megakernel"] = "auto",
        numerics: Literal["auto", "f32", "bf16"] = "auto",
        max_rows: int = 8,
        max_context: int | None = None,
        feature_layers: Sequence[int] = (),
        progress: bool = False,
    ) -> Model:
        """Loads a folder or a Hugging Face repository.

        ``devices`` are the ranks, in order (default: the first device only on CPU and GPU, all on
        TPU). ``max_context=None`` takes the smaller of the config's limit and 4096.

        Raises:
            kda_mla_kernels.errors.CheckpointError: a file or tensor is missing, damaged or of
                the wrong shape.
            kda_mla_kernels.errors.ConfigError: a config value is unknown, or the devices do not
                divide the model; the message lists what would.
        """
        ...


@runtime_checkable
class LoadsConverted(Protocol):
    """What a :class:`ModelPackage` also is if it has a form of weights that loads faster.

    Its ``load`` takes ``weights: str | Path = "auto"`` too: a folder of converted weights. With
    ``auto`` it is the checkpoint if that is such a folder itself, else the one that the variable
    names, else none.
    """

    weights_variable: str
    """Environment variable with a folder, e.g. ``KIMI_PRESHARDED_WEIGHTS``; ``load`` reads it."""


def packages() -> Mapping[str, EntryPoint]:
    """Installed model packages by family name; nothing is imported."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def find_package(family: str) -> ModelPackage:
    """Imports the package of a family.

    Raises:
        LookupError: no installed package has this name; the message lists those that exist.
    """
    found = packages()
    if family not in found:
        known = ", ".join(sorted(found)) or "none"
        raise LookupError(f"no model package named {family!r} is installed (installed: {known})")
    return found[family].load()


def package_for_model_type(model_type: str) -> ModelPackage:
    """The installed package that loads checkpoints with this ``model_type``.

    Raises:
        LookupError: none does; the message lists the types that are known.
    """
    known: list[str] = []
    for family in packages():
        package = find_package(family)
        if model_type in package.model_types:
            return package
        known += sorted(package.model_types)
    raise LookupError(
        f"no installed model package loads model_type {model_type!r}"
        f" (known: {', '.join(known) or 'none'})"
    )
