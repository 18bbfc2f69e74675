#!/usr/bin/env bash
# keys.sh DIR PREFILL,... DECODE,...: makes what a secured fleet needs and what lacks; needs kvbridge on PATH.
#   DIR/INSTANCE.key, .pub   the CURVE keys of each instance
#   DIR/allowed.keys         who may speak to nodes: each instance, in its own name
#   DIR/nodes.token          the nodes' http.token_file, bootstrap's daemons.token_file
#   DIR/bootstrap.token      bootstrap's http.token_file, the nodes' and the router's bootstrap.token_file
#   DIR/router.token         the router's http.token_file, the engines' API key
#   DIR/redis.password       where bootstraps share a Redis
set -euo pipefail
umask 077
directory=$1 instances="${2//,/ } ${3//,/ }"
mkdir -p "$directory"
for secret in nodes.token bootstrap.token router.token redis.password; do
  [ -e "$directory/$secret" ] || kvbridge keys token "$directory/$secret" >/dev/null
done
for instance in $instances; do
  [ -e "$directory/$instance.key" ] || kvbridge keys generate "$directory/$instance.key" --instance "$instance" >/dev/null
done
for instance in $instances; do
  echo "$(cat "$directory/$instance.pub") $instance"
done >"$directory/allowed.keys.new"
mv "$directory/allowed.keys.new" "$directory/allowed.keys"
