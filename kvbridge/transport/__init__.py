"""Backends that move bytes; `registry.create_transport` imports the one asked for, and only its library."""
