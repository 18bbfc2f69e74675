"""Which page belongs to whom: states, allocators, the page book."""
