"""The HTTP APIs: applications, and the server that runs them."""
