#!/usr/bin/env bash
# keys.sh DIR PREFILL,... DECODE,...: makes what a secured fleet needs, once; needs kvbridge on PATH.
#   DIR/INSTANCE.key, .pub   the CURVE keys of each instance
#   DIR/allowed.keys         who may connect to prefill nodes: each decode instance, in its own name
#   DIR/nodes.token          the nodes' http.token_file, bootstrap's daemons.token_file
#   DIR/bootstrap.token      bootstrap's http.token_file, the nodes' bootstrap.token_file
set -euo pipefail
umask 077
directory=$1 prefill=${2//,/ } decode=${3//,/ }
mkdir -p "$directory"
for token in nodes bootstrap; do
  [ -e "$directory/$token.token" ] || kvbridge keys token "$directory/$token.token" >/dev/null
done
for instance in $prefill $decode; do
  [ -e "$directory/$instance.key" ] || kvbridge keys generate "$directory/$instance.key" --instance "$instance" >/dev/null
done
for instance in $decode; do
  echo "$(cat "$directory/$instance.pub") $instance"
done >"$directory/allowed.keys.new"
mv "$directory/allowed.keys.new" "$directory/allowed.keys"
