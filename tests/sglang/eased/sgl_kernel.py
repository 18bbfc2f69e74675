"""A stand-in for SGLang's compiled kernels, since no index has a build for processors: every name is there and raises when called.

SGLang takes its own code in torch where a processor lacks AMX and where a submodule is missing, so nothing here is called.
"""

from __future__ import annotations

__version__ = "0.0.0"


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_named: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} was called: this environment has no kernels")

    return missing
