# A sentinel that watches the server that the other sentinels know, or PEERS' first one. WORK: its directory.
set -eu
mkdir -p "$WORK" && cd "$WORK"
password=$(cat "$PASSWORD_FILE")
master=$(REDISCLI_AUTH=$password timeout 3 redis-cli -h "$PEERS" -p 26379 sentinel get-master-addr-by-name kvbridge 2>/dev/null | head -n 1) || true
[ -n "$master" ] || master=$PEERS-0.$PEERS
umask 077
cat >sentinel.conf <<CONFIG
port 26379
bind $POD_IP
requirepass $password
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $POD_NAME.$PEERS
sentinel monitor kvbridge $master 6379 2
sentinel auth-pass kvbridge $password
sentinel sentinel-pass $password
sentinel down-after-milliseconds kvbridge 3000
sentinel failover-timeout kvbridge 10000
CONFIG
exec redis-server "$WORK/sentinel.conf" --sentinel
