"""The HTTP APIs: applications, the server that runs them, and clients for both.

Owns: routes, problem bodies, bearer tokens, FastAPI. Must not know: how services do their work.
"""
