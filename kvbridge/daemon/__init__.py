"""Composition roots: each daemon put together from configuration, and its life from start to drain."""
