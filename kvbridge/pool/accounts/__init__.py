"""The owners of pages: states, allocators, the page book."""
