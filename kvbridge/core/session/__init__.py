"""The life of a room on each side, as literal transition tables: events in, actions out."""
