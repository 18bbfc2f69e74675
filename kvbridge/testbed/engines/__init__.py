"""Engines as child processes of a command: how they are started, what they are told, what they report."""
