"""The other side of a transfer, as a real process: owns a buffer, registers it with its own transport, obeys commands.

Run as `python -m tests.helpers.transport_peer '<json>'` with keys name, settings, path, length_bytes and (optional)
extents, a list of [offset, length] to register instead of the whole buffer; memory, "dram" or "vram"; device, an
ordinal. One JSON object a line in, one out; the first line out is the answer to an implied `endpoint`. Whatever
libraries print goes to stderr. End of input ends the process.
"""

import base64
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from kvbridge.config.transports import TransportSettings
from kvbridge.core.errors import BridgeError
from kvbridge.transport import create_transport
from kvbridge.transport.base import Transport
from tests.helpers.shared_buffer import DeviceBuffer, SharedBuffer

Buffer = SharedBuffer | DeviceBuffer


def execute(command: dict[str, Any], transport: Transport, buffer: Buffer) -> dict[str, Any]:
    offset, length = command.get("offset", 0), command.get("length", buffer.length_bytes)
    match command["do"]:
        case "endpoint":
            endpoint = transport.endpoint()
            return {"transport": endpoint.transport, "data": base64.b64encode(endpoint.data).decode()}
        case "checksum":
            return {"sha256": hashlib.sha256(buffer.read(offset, length)).hexdigest()}
        case "register":
            transport.register([buffer.memory(offset, length)])
        case other:
            raise ValueError(f"no command '{other}'")
    return {}


def serve(arguments: dict[str, Any], answers: TextIO) -> None:
    """Build the transport, report the endpoint, then answer each line until the input ends."""
    transport = create_transport(arguments["name"], TransportSettings.model_validate(arguments["settings"]))
    buffer: Buffer
    opening = {}
    if arguments.get("memory") == "vram":
        buffer = DeviceBuffer(arguments["device"], arguments["length_bytes"])
        opening = {"opening": buffer.facts()}
    else:
        buffer = SharedBuffer(Path(arguments["path"]), arguments["length_bytes"])
    extents = arguments.get("extents") or [[0, buffer.length_bytes]]
    transport.register([buffer.memory(offset, length) for offset, length in extents])

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    answer(execute({"do": "endpoint"}, transport, buffer) | {"address": buffer.address} | opening)
    for line in sys.stdin:
        try:
            answer(execute(json.loads(line), transport, buffer))
        except (BridgeError, ValueError) as error:
            answer({"error": f"{type(error).__name__}: {error}"})
    transport.close()


def main() -> None:
    """Keep the real stdout for answers and send everything that libraries print to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(json.loads(sys.argv[1]), answers)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # some transfer libraries crash in their own exit handlers; that is not what is tested here


if __name__ == "__main__":
    main()
