"""A stand-in for torchvision, whose wheels need CUDA: its names are imported on the way to text models, and never called."""

from __future__ import annotations

import sys
import types

__version__ = "0.0.0"


class _Unused(type):
    """The type of every name of torchvision, and of the names below it."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Unused(name, (), {})


for _name in ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _module = _Module(f"torchvision.{_name}")
    _module.__path__ = []
    sys.modules[f"torchvision.{_name}"] = _module
    if "." not in _name:
        globals()[_name] = _module
sys.modules["torchvision.transforms"].functional = sys.modules["torchvision.transforms.functional"]
