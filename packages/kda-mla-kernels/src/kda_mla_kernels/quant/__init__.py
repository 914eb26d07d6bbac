"""Quantised weights: their encodings, exact decoding, and dots that read them packed."""
