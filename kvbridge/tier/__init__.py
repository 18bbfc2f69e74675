"""Prefixes that stay: page keys, the index of cached pages, and which of them go first."""
