"""The pure core: words, geometry, plans, session tables and messages. No I/O, no clock of its own, no tensors."""
