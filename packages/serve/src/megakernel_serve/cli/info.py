"""``megakernel info``: what a model is, what it needs, and how it can be divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megakernel_serve.cli.streams import output

if TYPE_CHECKING:
    from kda_mla_kernels.model import Model

    from megakernel_serve.cli.main import Invocation

__all__ = ["run"]


def run(invocation: Invocation) -> int:
    """Runs the command."""
    out = output()
    from rich.console import Console
    from rich.table import Table

    from megakernel_serve.cli.terminal import status
    from megakernel_serve.loading import choose, load_model

    choice = choose(invocation)
    model = load_model(choice, invocation.settings, progress=status.is_terminal)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _lines(model):
        table.add_row(name, value)
    Console(file=out, highlight=False).print(table)
    out.flush()
    return 0


def _lines(model: Model) -> list[tuple[str, str]]:
    info, defaults = model.info, model.generation
    ends = ", ".join(str(token) for token in sorted(defaults.stop_ids))
    sampling = f"temperature {defaults.temperature}, top_p {defaults.top_p}"
    return [
        ("name", info.name),
        ("family", info.family),
        ("backend", f"{info.backend}, {info.numerics} numerics, {info.ranks} rank(s)"),
        ("legal ranks", ", ".join(map(str, info.legal_ranks))),
        ("parameters", f"{info.parameters:,}"),
        ("weights", f"{_bytes(info.weight_bytes)} in memory, all ranks together"),
        ("state", f"{_bytes(_state_bytes(model))} for {info.max_rows} row(s)"),
        *info.details,
        ("layers", f"{info.num_layers} of width {info.hidden_size}"),
        ("vocabulary", f"{info.vocab_size:,} ids"),
        ("context", f"{info.max_context:,} positions per row"),
        ("prefill", f"{info.max_chunk:,} tokens per chunk"),
        ("sampling", f"{sampling}, top_k {defaults.top_k}, min_p {defaults.min_p}"),
        ("end ids", ends or "none"),
    ]


def _state_bytes(model: Model) -> int:
    """Bytes of a state's arrays; shapes are enough, so nothing is allocated."""
    import jax

    state = jax.eval_shape(model.init_state)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _bytes(count: int) -> str:
    size, units = float(count), ["B", "KB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
