#!/usr/bin/env bash
# Writes docker/cpu.lock and docker/cuda.lock: every package of the images, its version, and the hashes that it must have.
# Run it to take newer versions; it needs uv. torch is left out: NIXL's wheels ask for it, and no daemon imports it.
set -euo pipefail
cd "$(dirname "$0")/.."
without_torch=$(mktemp)
trap 'rm -f "$without_torch"' EXIT
echo "torch ; sys_platform == 'never'" >"$without_torch"
for target in cpu cuda; do
  # setuptools builds kvbridge. NVRTC compiles its kernels, Mooncake is linked against CUDA 12's runtime; torch would bring both.
  { echo "setuptools>=77"; [ "$target" = cpu ] || printf '%s\n' "nvidia-cuda-nvrtc>=13" "nvidia-cuda-runtime-cu12>=12"; } |
    uv pip compile pyproject.toml - --extra "$target" --extra redis --extra traces --override "$without_torch" --output-file "docker/$target.lock" \
      --generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28 --only-binary :all: \
      --no-annotate --custom-compile-command docker/lock.sh --quiet --upgrade
done
