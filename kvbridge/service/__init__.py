"""The roles at work: what a daemon does with rooms, between its doors (HTTP, control) and the pure core."""
