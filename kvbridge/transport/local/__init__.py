"""The transport between processes of one host."""
