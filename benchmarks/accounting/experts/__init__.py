"""How Kimi K3's routed experts may be split over ranks and held: what each choice costs.

Run it as ``python -m benchmarks.accounting.experts``; ``docs/kimi-layout.md`` says what follows.
"""
