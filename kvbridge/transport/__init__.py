"""Backends that move bytes. Import the backend through `registry.create_transport`, so that only its library is loaded."""
