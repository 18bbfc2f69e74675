"""Kernels from source to launch: compiled at run time, kept on disk, launched on the caller's stream.

Sources are `kernels/csrc/*.cu` (and `*.cuh`, which they include); each holds `extern "C"` kernels. NVRTC compiles one in about 0.1
s to machine code for the device at hand, so no compiler has to be installed. The result lies in `$KVBRIDGE_KERNEL_CACHE` (default:
`~/.cache/kvbridge/kernels`) under a name that is a digest of everything it depends on; a file that is damaged or cannot be written
costs a compilation, never an error. A launch costs about 5 us of the processor, and nothing of that inside a CUDA graph.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import structlog

from kvbridge.core.errors import BridgeError, UnsupportedError
from kvbridge.kernels.cuda import runtime

CACHE_VARIABLE = "KVBRIDGE_KERNEL_CACHE"
DEFAULT_SHARED_BYTES = 48 * 1024

log = structlog.get_logger(__name__)

_lock = threading.Lock()
_loaded: dict[tuple[str, int], Any] = {}
"""Modules of this process, by (digest, device)."""


class KernelBuildError(BridgeError, code="kernel_build_failed"):
    """The compiler has refused a kernel's source: a defect of kvbridge, or a compiler that is too old."""


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel source and its definitions: with device and compiler, all that its machine code depends on."""

    name: str
    """A file in `kernels/csrc`, without its ending."""
    defines: tuple[tuple[str, int], ...] = ()
    """Preprocessor definitions, so that sizes can be compile-time constants."""

    def text(self) -> str:
        """Return the source with the headers of `csrc` in place of their includes."""
        return _expanded(f"{self.name}.cu")


class Kernel:
    """One kernel on one device. `launch` may be called under CUDA graph capture."""

    def __init__(self, device: int, kernel: Any) -> None:  # noqa: ANN401 - cuda-core ships no types
        self.device = device
        self._kernel = kernel
        self._core = runtime.library("cuda.core")

    def launch(
        self, arguments: Sequence[Any], *, grid: int, block: int, stream: int, shared_bytes: int | None = None
    ) -> None:
        """Launch on the stream with a handle. Arguments: int (64 bits, or an address), numpy scalars for other widths.

        `grid`: blocks; `block`: threads of one, a multiple of 32; `shared_bytes`: its dynamic shared memory.
        """
        runtime.use(self.device)
        made = _stream(self.device, stream)
        config = self._core.LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes or None)
        self._core.launch(made, config, self._kernel, *arguments)

    def allow_shared(self, shared_bytes: int) -> None:
        """Allow launches with so much dynamic shared memory; without this 48 KiB are the limit. Raises UnsupportedError."""
        if shared_bytes <= DEFAULT_SHARED_BYTES:
            return
        driver = runtime.library("cuda.bindings.driver")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        code, function = driver.cuKernelGetFunction(int(self._kernel.handle))
        if not int(code):
            (code,) = driver.cuFuncSetAttribute(function, attribute, shared_bytes)
        if int(code):
            raise UnsupportedError(
                f"cuda:{self.device} gives a block less than {shared_bytes} bytes of shared memory ({code})"
            )


def kernel(source: Source, name: str, device: int) -> Kernel:
    """Return a kernel of a source, ready on a device. Raises KernelBuildError, UnsupportedError without CUDA."""
    major, minor = _capability(device)
    code, digest = _machine_code(source, f"sm_{major}{minor}{'a' if major >= 9 else ''}")
    with _lock:
        module = _loaded.get((digest, device))
        if module is None:
            runtime.use(device)
            runtime.library("cuda.core").Device(device).set_current()
            module = runtime.library("cuda.core").ObjectCode.from_cubin(code)
            _loaded[digest, device] = module
    return Kernel(device, module.get_kernel(name))


def compile_for(source: Source, architecture: str) -> bytes:
    """Return machine code for an architecture ("sm_90a"). Needs NVRTC, but no device. Raises KernelBuildError."""
    core = runtime.library("cuda.core")
    options = core.ProgramOptions(
        arch=architecture, std="c++17", define_macro=[(key, str(value)) for key, value in source.defines] or None
    )
    try:
        return bytes(core.Program(source.text(), "c++", options).compile("cubin").code)
    except Exception as error:
        raise KernelBuildError(f"kernel {source.name} cannot be compiled for {architecture}: {error}") from error


def cache_directory() -> Path | None:
    """Return the directory of compiled kernels. They are run, so only this user may write there. None for a user without home."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvbridge" / "kernels"
    except RuntimeError:
        return None


# ------------------------------------------------------------------------------------------- inside


@cache
def _capability(device: int) -> tuple[int, int]:
    return runtime.device_facts(device).capability


@cache
def _machine_code(source: Source, architecture: str) -> tuple[bytes, str]:
    digest = _digest(source, architecture)
    directory = cache_directory()
    if directory is None:
        return compile_for(source, architecture), digest
    file = directory / f"{source.name}-{digest}.cubin"
    with suppress(OSError):
        content = file.read_bytes()
        if content[:32] == hashlib.sha256(content[32:]).digest():
            return content[32:], digest
        log.warning("kernel_cache_damaged", file=str(file))
    code = compile_for(source, architecture)
    _keep(file, hashlib.sha256(code).digest() + code)
    return code, digest


def _digest(source: Source, architecture: str) -> str:
    compiler = runtime.library("cuda.bindings.nvrtc").nvrtcVersion()
    facts = "\0".join([source.text(), repr(sorted(source.defines)), architecture, repr(compiler[1:])])
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def _keep(file: Path, content: bytes) -> None:
    """Write the whole file or nothing; another process may do the same."""
    scratch = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(content)
        scratch.replace(file)
    except OSError as error:
        log.info(
            "kernel_not_kept", file=str(file), reason=str(error), hint=f"set {CACHE_VARIABLE} to a writable directory"
        )


def _expanded(file: str) -> str:
    text = resources.files("kvbridge.kernels").joinpath("csrc", file).read_text(encoding="utf-8")
    return re.sub(r'^#include "(.+)"$', lambda included: _expanded(included[1]), text, flags=re.MULTILINE)


@cache
def _stream(device: int, handle: int) -> Any:  # noqa: ANN401
    """Return cuda-core's object of a stream; made once, since making it costs as much as a launch."""
    target = runtime.library("cuda.core").Device(device)
    target.set_current()
    return target.create_stream(runtime.Stream.of(device, handle))
