# A Redis server that begins as a copy of the server that the sentinels know, or of PEERS' first one. WORK: its directory.
set -eu
mkdir -p "$WORK" && cd "$WORK"
password=$(cat "$PASSWORD_FILE")
self=$POD_NAME.$PEERS
master=$(REDISCLI_AUTH=$password timeout 3 redis-cli -h "$PEERS" -p 26379 sentinel get-master-addr-by-name kvbridge 2>/dev/null | head -n 1) || true
[ -n "$master" ] || master=$PEERS-0.$PEERS
umask 077
cat >redis.conf <<CONFIG
port 6379
bind $POD_IP
save ""
appendonly no
requirepass $password
masterauth $password
replica-announce-ip $self
CONFIG
[ "$master" = "$self" ] || echo "replicaof $master 6379" >>redis.conf
exec redis-server "$WORK/redis.conf"
