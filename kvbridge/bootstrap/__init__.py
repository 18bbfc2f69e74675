"""The directory of instances, and the pairing of requests."""
