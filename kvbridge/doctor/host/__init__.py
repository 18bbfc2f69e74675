"""The edge: reads the facts of this host, and asks those that it depends on. What cannot be read is left at its default."""
