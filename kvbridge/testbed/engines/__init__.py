"""Engines as child processes of a command: how they are started, what they are ordered to do, what they report."""
