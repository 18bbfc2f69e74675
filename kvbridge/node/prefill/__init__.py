"""The rooms of a prefill node."""
