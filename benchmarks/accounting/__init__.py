"""What a step of a decode kernel reads, waits for and should take, without a TPU.

Run it as ``python -m benchmarks.accounting``; ``docs/accounting.md`` says what the figures are.
"""
