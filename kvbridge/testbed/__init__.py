"""Whole clusters on one host: the demo and the trace replay. Nothing in the product imports it."""
