"""The steps that Redis takes as one, in Lua: each script reads, decides and writes without anybody in between.

Keys, each behind the namespace (`member` is the JSON list of instance and node):

    nodes            set: the members that have registered and are not known to be gone
    node:<member>    hash: incarnation, entry, digest (of the entry), beat, seen_ms, charges; expires with the node
    room:<id>        hash: state, generation, owner, claimed_ms, paired_in, settled_ms, ticket; expires when the room is forgotten
    pairing, paired, cancelled   sorted sets: rooms in that state, by the time at which they are forgotten
    prefix:<key>     sorted set: instances that were given a prompt that begins so, by when; expires when it has not come again
    prefixes         sorted set: the page keys that there are so, by when each came last; expires with the last of them

All times are Redis's own, in milliseconds. What somebody else left under one of our names is read as absent, and replaced when we
write there.
"""

from __future__ import annotations

from typing import Final

PRELUDE: Final = """
local function clock_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end
local function read(...)  -- nil for a key of another type
  local found = redis.pcall(...)
  if type(found) == 'table' and found.err then return nil end
  return found
end
local function own(key, kind)  -- a key of another type has to go
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end
local function row(node)  -- a field that is missing is false; nil when there is none
  local fields = read('HMGET', node, 'incarnation', 'digest', 'beat', 'seen_ms', 'charges') or {}
  return (fields[1] or fields[2] or fields[3] or fields[4]) and fields or nil
end
local function rows(namespace, members, first)
  local found = {}
  for at = first, #members do
    local node = row(namespace .. 'node:' .. members[at])
    if node then found[#found + 1] = {members[at], node} end
  end
  return found
end
local function of_instance(nodes, prefix)  -- `prefix`: with which all of its members begin
  local found = {}
  for _, member in ipairs(read('SMEMBERS', nodes) or {}) do
    if string.sub(member, 1, #prefix) == prefix then found[#found + 1] = member end
  end
  return found
end
local function live_on(node, nodes, member, expire_ms, keep_ms)
  redis.call('PEXPIRE', node, expire_ms)
  own(nodes, 'set')
  redis.call('SADD', nodes, member)
  redis.call('PEXPIRE', nodes, keep_ms)
end
"""
"""What every script begins with."""

SCRIPTS: Final = {
    "LOOK": """
-- KEYS: nodes. ARGV: namespace, the prefix of the members that are wanted, then members themselves.
-- Returns msgpack: [now_ms, [[member, [incarnation, digest, beat, seen_ms, charges]], ...]].
local found = #ARGV > 2 and rows(ARGV[1], ARGV, 3) or rows(ARGV[1], of_instance(KEYS[1], ARGV[2]), 1)
return cmsgpack.pack({clock_ms(), found})
""",
    "PUT": """
-- KEYS: node, nodes. ARGV: version, prefix (see LOOK), namespace, member, expire_ms, keep_ms, then fields and values of the node.
-- An instance's version is made of what its nodes have registered, as redis._version does. Returns 1 when it was as given.
local parts = {}
for at, one in ipairs(rows(ARGV[3], of_instance(KEYS[2], ARGV[2]), 1)) do
  parts[at] = one[1] .. '\\0' .. (one[2][1] or '') .. '\\0' .. (one[2][2] or '')
end
table.sort(parts)
if redis.sha1hex(table.concat(parts, '\\1')) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'seen_ms', clock_ms(), unpack(ARGV, 7))
live_on(KEYS[1], KEYS[2], ARGV[4], ARGV[5], ARGV[6])
return 1
""",
    "BEAT": """
-- KEYS: node, nodes. ARGV: incarnation, beat, member, expire_ms, keep_ms.
-- Returns msgpack: [now_ms, row] as it is afterwards, see LOOK; nil when the node is not there.
local node = row(KEYS[1])
if not node or redis.call('HEXISTS', KEYS[1], 'entry') == 0 then return nil end
if node[1] == ARGV[1] then
  redis.call('HSET', KEYS[1], 'beat', ARGV[2], 'seen_ms', clock_ms())
  redis.call('HDEL', KEYS[1], 'charges')
  live_on(KEYS[1], KEYS[2], ARGV[3], ARGV[4], ARGV[5])
  node = row(KEYS[1])
end
return cmsgpack.pack({clock_ms(), node})
""",
    "REMOVE": """
-- KEYS: node, nodes. ARGV: incarnation, member. Returns 1 when the node was of this incarnation.
if read('HGET', KEYS[1], 'incarnation') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
own(KEYS[2], 'set')
redis.call('SREM', KEYS[2], ARGV[2])
return 1
""",
    "CHARGE": """
-- KEYS: nodes' hashes. ARGV: for each of them msgpack of what is to be added to `charges`, by name.
for at, key in ipairs(KEYS) do
  local node = row(key)
  if node then
    local whole, charges = pcall(cmsgpack.unpack, node[5] or '')
    if not whole or type(charges) ~= 'table' then charges = {} end
    for name, more in pairs(cmsgpack.unpack(ARGV[at])) do charges[name] = (tonumber(charges[name]) or 0) + more end
    redis.call('HSET', key, 'charges', cmsgpack.pack(charges))
  end
end
""",
    "EXPIRE": """
-- KEYS: nodes. ARGV: namespace. Returns the members that were silent for too long; each to one caller.
own(KEYS[1], 'set')
local gone = {}
for _, member in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. 'node:' .. member) == 0 then
    redis.call('SREM', KEYS[1], member)
    gone[#gone + 1] = member
  end
end
return gone
""",
    "CLAIM": """
-- KEYS: room, pairing, paired, cancelled. ARGV: namespace, id, owner, generations, claim_ms, keep_ms, max_rooms.
-- Returns {1, base} when the room is claimed, {0, age_ms} when it is in use.
for at = 2, 4 do own(KEYS[at], 'zset') end
own(KEYS[1], 'hash')
local now_ms = clock_ms()
local known = redis.call('HMGET', KEYS[1], 'state', 'generation', 'claimed_ms')
local age_ms = math.max(0, now_ms - (tonumber(known[3]) or 0))
if known[1] == 'paired' or (known[1] == 'pairing' and age_ms < tonumber(ARGV[5])) then return {0, age_ms} end
local base = math.floor(tonumber(known[2]) or 0)
if not (base >= 0 and base < 2^53) then base = 0 end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'state', 'pairing', 'generation', base + ARGV[4], 'owner', ARGV[3], 'claimed_ms', now_ms)
redis.call('PEXPIRE', KEYS[1], ARGV[6])
redis.call('ZREM', KEYS[4], ARGV[2])
redis.call('ZADD', KEYS[2], now_ms + ARGV[6], ARGV[2])
if redis.call('ZCARD', KEYS[2]) + redis.call('ZCARD', KEYS[3]) + redis.call('ZCARD', KEYS[4]) > tonumber(ARGV[7]) then
  local oldest = redis.call('ZPOPMIN', KEYS[4])[1] or redis.call('ZPOPMIN', KEYS[3])[1]
  if oldest then redis.call('DEL', ARGV[1] .. 'room:' .. oldest) end
end
return {1, base}
""",
    "END": """
-- KEYS as of CLAIM. ARGV: id, field, value that the field has to have, state, its place in KEYS, generation, and a ticket.
-- Returns 1 when the room has come into the state.
if read('HGET', KEYS[1], ARGV[2]) ~= ARGV[3] then return 0 end
local now_ms = clock_ms()
redis.call('HSET', KEYS[1], 'state', ARGV[4], 'generation', ARGV[6])
redis.call('HDEL', KEYS[1], 'paired_in')
if ARGV[7] then redis.call('HSET', KEYS[1], 'paired_in', ARGV[6], 'ticket', ARGV[7], 'settled_ms', now_ms) end
for at = 2, 4 do
  own(KEYS[at], 'zset')
  redis.call('ZREM', KEYS[at], ARGV[1])
end
redis.call('ZADD', KEYS[tonumber(ARGV[5])], now_ms + math.max(redis.call('PTTL', KEYS[1]), 0), ARGV[1])
return 1
""",
    "TICKET": """
-- KEYS: room. Returns [now_ms, state, generation, ticket, settled_ms], each nil when it is not there.
local fields = read('HMGET', KEYS[1], 'state', 'generation', 'ticket', 'settled_ms') or {}
return {clock_ms(), fields[1] or false, fields[2] or false, fields[3] or false, fields[4] or false}
""",
    "COUNTS": """
-- KEYS: pairing, paired, cancelled. Forgets rooms by age and returns how many are in each state.
local counts = {}
for at, key in ipairs(KEYS) do
  own(key, 'zset')
  redis.call('ZREMRANGEBYSCORE', key, '-inf', clock_ms())
  counts[at] = redis.call('ZCARD', key)
end
return counts
""",
    "NOTE": """
-- KEYS: prefixes, then those of prefixes. ARGV: namespace, note_keep_ms, instances kept, notes kept, instance, instance.
local now_ms = clock_ms()
own(KEYS[1], 'zset')
for at = 2, #KEYS do
  own(KEYS[at], 'zset')
  redis.call('ZADD', KEYS[at], now_ms, ARGV[5], now_ms, ARGV[6])
  redis.call('ZREMRANGEBYRANK', KEYS[at], 0, -1 - ARGV[3])
  redis.call('PEXPIRE', KEYS[at], ARGV[2])
  redis.call('ZADD', KEYS[1], now_ms, string.sub(KEYS[at], -32))
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
-- More than one ticket adds, so what is too much goes in time, and no step takes long.
local over = redis.call('ZCARD', KEYS[1]) - ARGV[4]
if over > 0 then
  local old = redis.call('ZPOPMIN', KEYS[1], math.min(over, 64))
  for at = 1, #old, 2 do redis.call('DEL', ARGV[1] .. 'prefix:' .. old[at]) end
end
""",
    "NOTED": """
-- KEYS: prefixes. Returns msgpack: [now_ms, [[instance, given_ms, instance, given_ms, ...], ...]], a list for each key.
local found = {}
for at, key in ipairs(KEYS) do found[at] = read('ZRANGE', key, 0, -1, 'WITHSCORES') or {} end
return cmsgpack.pack({clock_ms(), found})
""",
}
