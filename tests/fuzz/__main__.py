"""Coverage-guided fuzzing of the decoders: `python -m tests.fuzz [FAMILY ...] --seconds 60` (`make fuzz`).

A finding is kept as `out/fuzz/FAMILY-crash-*`; run it again with `python -m tests.fuzz FAMILY --input FILE`.
"""

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["kvbridge"], enable_loader_override=False):
    from tests.fuzz.decoders import DECODERS, Decoder, family

TIMEOUT_S = 5
RSS_MB = 2_048
LONGEST_INPUT = 65_536
FAMILIES = tuple(dict.fromkeys(decoder.family for decoder in DECODERS))


def main() -> int:
    """Fuzz each family in a process of its own; returns how many had a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="all unless named")
    parser.add_argument("--seconds", type=int, default=60, help="for each family")
    parser.add_argument("--output", type=Path, default=Path("out/fuzz"))
    parser.add_argument("--input", type=Path, help="feed this file once")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside or given.input:
        fuzz(given.families[0], given.output, given.seconds, given.input)
        return 0
    found = []
    for name in given.families or FAMILIES:
        command = [sys.executable, "-m", "tests.fuzz", name, "--inside"]
        command += ["--seconds", str(given.seconds), "--output", str(given.output)]
        if subprocess.run(command, check=False).returncode:
            found.append(name)
    print(f"findings in: {', '.join(found)}; see {given.output}" if found else "no findings")
    return len(found)


def fuzz(name: str, output: Path, seconds: int, given: Path | None) -> None:
    """Run libFuzzer in this process; it ends the process."""
    decoders = family(name)
    corpus = output / name
    corpus.mkdir(parents=True, exist_ok=True)
    for index, decoder in enumerate(decoders):
        for seed in decoder.seeds:
            (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(bytes([index]) + seed)
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={RSS_MB}",
        f"-max_len={LONGEST_INPUT}",
        f"-artifact_prefix={output}/{name}-",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *([str(given)] if given else [*options, str(corpus)])], _one(decoders))
    atheris.Fuzz()


def _one(decoders: tuple[Decoder, ...]):
    def test_one_input(data: bytes) -> None:
        if data:
            decoders[data[0] % len(decoders)].feed(data[1:])

    return test_one_input


if __name__ == "__main__":
    sys.exit(main())
