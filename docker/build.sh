#!/usr/bin/env bash
# What the steps of docker/Dockerfile do; a test does the same without a container engine.
#   build.sh system               the shared libraries that wheels are linked against
#   build.sh user [ROOT]          the user of the daemons, in the system below ROOT
#   build.sh packages TARGET DIR  a virtual environment in DIR with the packages of TARGET (cpu or cuda), by their hashes
#   build.sh kvbridge DIR         kvbridge itself, into that environment
#   build.sh check TARGET DIR     everything that a daemon loads is there
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
step=${1:?which step: system, user, packages, kvbridge or check}
pip() { "$environment/bin/python" -m pip --disable-pip-version-check --no-cache-dir "$@"; }

case $step in
system)
  bash "$here/system-libraries.sh" libibverbs1 libnuma1 libcurl4 librdmacm1 ibverbs-providers
  ;;
user)
  # The number is what Kubernetes and volumes know; engines of other users share its group (runtime_group).
  root=${2:-/}
  groupadd --prefix "$root" --gid 10001 kvbridge
  useradd --prefix "$root" --uid 10001 --gid 10001 --home-dir /var/lib/kvbridge --no-create-home --shell /usr/sbin/nologin kvbridge
  install -d -m 0700 -o 10001 -g 10001 "$root/var/lib/kvbridge" "$root/var/lib/kvbridge/keys"
  ;;
packages)
  target=$2 environment=$3
  python3 -m venv "$environment"
  pip install --quiet --require-hashes --no-deps --only-binary :all: --requirement "$here/$target.lock"
  ;;
kvbridge)
  environment=$2 copy=$(mktemp -d)
  trap 'rm -rf "$copy"' EXIT
  # Built from a copy: setuptools leaves its work beside the sources.
  cp -r "$here/../kvbridge" "$here/../pyproject.toml" "$here/../README.md" "$here/../LICENSE" "$copy"
  pip install --quiet --no-deps --no-build-isolation --no-index "$copy"
  ;;
check)
  target=$2 environment=$3
  # The driver's library is the host's. Mooncake cannot be imported without it, so its libraries are looked for instead.
  missing=$(LD_LIBRARY_PATH="$environment/lib/python3.11/site-packages/nvidia/cuda_runtime/lib" \
    ldd "$environment"/lib/python3.11/site-packages/mooncake/engine*.so | grep 'not found' | grep -v 'libcuda\.so\.1 ' || true)
  [ -z "$missing" ] || { echo "build.sh: $missing" >&2; exit 1; }
  "$environment/bin/python" - "$target" <<'PYTHON'
import importlib, importlib.util, sys
assert importlib.util.find_spec("torch") is None, "torch is in the image: gigabytes for nothing"
nixl = "nixl_cu12._bindings" if sys.argv[1] == "cpu" else "nixl_cu13._bindings"
modules = ["kvbridge.daemon.prefill", "kvbridge.daemon.decode", "kvbridge.daemon.bootstrap", "kvbridge.worker.lifecycle",
           "kvbridge.bootstrap.redis_store", "opentelemetry.exporter.otlp.proto.http.trace_exporter", nixl,
           "mooncake.engine" if sys.argv[1] == "cpu" else "cuda.bindings.runtime"]
for module in modules:
    importlib.import_module(module)
PYTHON
  "$environment/bin/kvbridge" --help >/dev/null
  ;;
*)
  echo "build.sh: no step is called $step" >&2
  exit 2
  ;;
esac
