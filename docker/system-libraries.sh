#!/usr/bin/env bash
# Installs the Debian packages named on the command line that are missing, where it may; otherwise says in one line what to do.
set -euo pipefail

missing=()
for package in "$@"; do
  # Newer releases renamed some packages for 64-bit time (libcurl4t64); either name will do.
  if ! dpkg-query --show --showformat '${Status}\n' "$package" "${package}t64" 2>/dev/null | grep -q 'install ok installed'; then
    missing+=("$package")
  fi
done
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -eq 0 ]; then
  as_root=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  as_root=(sudo -n)
else
  echo "kvbridge: this needs the system packages ${missing[*]}; ask an administrator to run: apt-get install -y ${missing[*]}" >&2
  exit 1
fi
if ! command -v apt-get >/dev/null; then
  echo "kvbridge: this needs what Debian calls ${missing[*]}; install your system's packages of them" >&2
  exit 1
fi
"${as_root[@]}" apt-get update -qq
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
