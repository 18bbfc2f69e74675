"""The rank worker: one process (or thread of an engine) a device, which moves bytes and decides nothing."""
