"""The rooms of a decode node."""
