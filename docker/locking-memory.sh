#!/usr/bin/env bash
# locking-memory.sh COMMAND...: runs it as the user of the daemons (or of KVBRIDGE_USER, a number), with the right to lock memory.
#
# A container's capabilities reach only root's processes, and network devices need all of a pool locked. So where the limit on
# locked memory cannot be raised for all containers of the host, start the container as root with the capabilities IPC_LOCK,
# SETUID, SETGID and SETPCAP, and this as its command: what it runs is no root and has IPC_LOCK alone.
set -euo pipefail
user=${KVBRIDGE_USER:-10001}
exec setpriv --reuid "$user" --regid "$user" --keep-groups --no-new-privs \
  --bounding-set -all,+ipc_lock --inh-caps -all,+ipc_lock --ambient-caps -all,+ipc_lock -- "$@"
