"""Stores below host memory: objects of whole pages that are compared before they are used, and the process that keeps them."""
