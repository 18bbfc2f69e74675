"""The steps that Redis takes as one, in Lua: each script reads, decides and writes without anybody in between.

Owns: the layout of the keys and every change of them. Must not know: what the values mean.

Keys, each behind the namespace (`member` is the JSON list of instance and node):

    nodes               sorted set: member, by the time at which it expires
    node:<member>       hash: incarnation, digest (of the entry), beat, seen_ms, group; expires with the node
    entry:<member>      the large part of the record; expires with the node
    charge:<member>     hash: pages by space, and `rooms`; expires with the node, gone with its next heartbeat
    instance:<name>     set: the members of an instance; expires with the last of them
    group:<role>        set: the instances of a role; expires with the last of them
    group:<role>:<fingerprint>   the same, of one model
    version:<instance>  drawn anew with each registration of one of the instance's nodes
    room:<id>           hash: state, generation, owner, claimed_ms, settled_ms, ticket; expires when the room is forgotten
    prefix:<page key>   sorted set: instances that were given a prompt that begins so, by when; expires when it has not come again
    prefixes            sorted set: the page keys that there are so, by when each came last; expires with the last of them
    pairing, paired, cancelled   sorted sets: rooms in that state, by the time at which they are forgotten

All times are Redis's own, in milliseconds. What somebody else left under one of our names is read as absent, and
replaced when we write there.
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
local function own(key, kind)  -- 1 when a key of another type had to go
  local found = redis.call('TYPE', key).ok
  if found == kind or found == 'none' then return 0 end
  redis.call('DEL', key)
  return 1
end
local function enrol(namespace, member, instance, group, ttl_ms)  -- `group` is <role>:<fingerprint>
  local names = {['instance:' .. instance] = member}
  names['group:' .. string.match(group, '^[^:]*')], names['group:' .. group] = instance, instance
  for set, name in pairs(names) do
    own(namespace .. set, 'set')
    redis.call('SADD', namespace .. set, name)
    redis.call('PEXPIRE', namespace .. set, ttl_ms)
  end
end
local function row(node, charge)  -- a field that is missing is false; nil when there is none
  local fields = read('HMGET', node, 'incarnation', 'digest', 'beat', 'seen_ms', 'group') or {}
  if not (fields[1] or fields[2] or fields[3] or fields[4]) then return nil end
  fields[6] = read('HGETALL', charge) or {}
  return fields
end
local function members(namespace, instance, found)  -- add its nodes that live to `found`; whether there are any
  local set, lives = namespace .. 'instance:' .. instance, false
  for _, member in ipairs(read('SMEMBERS', set) or {}) do
    local node = row(namespace .. 'node:' .. member, namespace .. 'charge:' .. member)
    if node then
      found[#found + 1], lives = {member, node}, true
    else
      redis.call('SREM', set, member)
    end
  end
  return lives
end
local function move(room, id, to, state, keep_ms)  -- from one of KEYS[2] to KEYS[4], see CLAIM
  for at = 2, 4 do
    if at ~= to then redis.call('ZREM', KEYS[at], id) end
  end
  redis.call('HSET', room, 'state', state)
  if keep_ms then redis.call('ZADD', KEYS[to], keep_ms, id) end
end
local function forgotten_ms(room)
  return clock_ms() + math.max(redis.call('PTTL', room), 0)
end
"""
"""What every script begins with."""

SCRIPTS: Final = {
    "NODES": """
-- KEYS: nodes. ARGV: namespace.
-- Returns msgpack: [now_ms, [[member, [incarnation, digest, beat, seen_ms, group, charges]], ...]], charges a flat list.
local now_ms, found = clock_ms(), {}
for _, member in ipairs(read('ZRANGEBYSCORE', KEYS[1], '(' .. now_ms, '+inf') or {}) do
  local node = row(ARGV[1] .. 'node:' .. member, ARGV[1] .. 'charge:' .. member)
  if node then found[#found + 1] = {member, node} end
end
return cmsgpack.pack({now_ms, found})
""",
    "DRAW": """
-- KEYS: groups. ARGV: namespace, count, instance, instance, ...
-- Returns the nodes of `count` instances of each group, and of the instances that are named, as NODES does.
local found, taken = {}, {}
for _, group in ipairs(KEYS) do
  for _, instance in ipairs(read('SRANDMEMBER', group, ARGV[2]) or {}) do
    taken[instance] = true
    if not members(ARGV[1], instance, found) then redis.call('SREM', group, instance) end
  end
end
for at = 3, #ARGV do
  if not taken[ARGV[at]] then members(ARGV[1], ARGV[at], found) end
end
return cmsgpack.pack({clock_ms(), found})
""",
    "PUT": """
-- KEYS: nodes, node, entry, charge, version.
-- ARGV: version, next version, member, incarnation, digest, beat, entry, expire_ms, version_keep_ms, namespace, instance, group.
own(KEYS[5], 'string')
if (redis.call('GET', KEYS[5]) or '') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[5], ARGV[2], 'PX', ARGV[9])
local now_ms = clock_ms()
redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
local facts = {'incarnation', ARGV[4], 'digest', ARGV[5], 'beat', ARGV[6], 'seen_ms', now_ms, 'group', ARGV[12]}
redis.call('HSET', KEYS[2], unpack(facts))
redis.call('PEXPIRE', KEYS[2], ARGV[8])
redis.call('SET', KEYS[3], ARGV[7], 'PX', ARGV[8])
own(KEYS[1], 'zset')
redis.call('ZADD', KEYS[1], now_ms + ARGV[8], ARGV[3])
enrol(ARGV[10], ARGV[3], ARGV[11], ARGV[12], ARGV[8])
return 1
""",
    "BEAT": """
-- KEYS: nodes, node, entry, charge. ARGV: member, incarnation, beat, expire_ms, namespace, instance.
-- Returns msgpack: [now_ms, row] as it is afterwards, see NODES; nil when the node is not there.
local node, now_ms = row(KEYS[2], KEYS[4]), clock_ms()
if not node or not node[5] or redis.call('EXISTS', KEYS[3]) == 0 then return nil end
if node[1] == ARGV[2] then
  redis.call('HSET', KEYS[2], 'beat', ARGV[3], 'seen_ms', now_ms)
  redis.call('PEXPIRE', KEYS[2], ARGV[4])
  redis.call('PEXPIRE', KEYS[3], ARGV[4])
  redis.call('DEL', KEYS[4])
  own(KEYS[1], 'zset')
  redis.call('ZADD', KEYS[1], now_ms + ARGV[4], ARGV[1])
  enrol(ARGV[5], ARGV[1], ARGV[6], node[5], ARGV[4])
  node = row(KEYS[2], KEYS[4])
end
return cmsgpack.pack({now_ms, node})
""",
    "REMOVE": """
-- KEYS: nodes, node, entry, charge. ARGV: member, incarnation.
-- Returns msgpack: [now_ms, row, entry] as it was before, see NODES; nil when the node is not there.
local node, entry = row(KEYS[2], KEYS[4]), read('GET', KEYS[3])
if not node or not entry then return nil end
local before = cmsgpack.pack({clock_ms(), node, entry})
if node[1] == ARGV[2] then
  redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
  own(KEYS[1], 'zset')
  redis.call('ZREM', KEYS[1], ARGV[1])
end
return before
""",
    "CHARGE": """
-- KEYS: node, charge, node, charge, ... ARGV: for each node msgpack of [field, amount, field, amount, ...].
for at = 1, #KEYS, 2 do
  local left_ms, fields = redis.call('PTTL', KEYS[at]), cmsgpack.unpack(ARGV[(at + 1) / 2])
  if left_ms > 0 then
    own(KEYS[at + 1], 'hash')
    for field = 1, #fields, 2 do
      local counted = redis.pcall('HINCRBY', KEYS[at + 1], fields[field], fields[field + 1])
      if type(counted) == 'table' then redis.call('HSET', KEYS[at + 1], fields[field], fields[field + 1]) end
    end
    redis.call('PEXPIRE', KEYS[at + 1], left_ms)
  end
end
""",
    "EXPIRE": """
-- KEYS: nodes. Returns the members that were silent for too long; each to one caller.
own(KEYS[1], 'zset')
local gone = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', clock_ms())
for _, member in ipairs(gone) do redis.call('ZREM', KEYS[1], member) end
return gone
""",
    "TICKET": """
-- KEYS: room. Returns [now_ms, state, generation, ticket, settled_ms], each nil when it is not there.
local fields = read('HMGET', KEYS[1], 'state', 'generation', 'ticket', 'settled_ms') or {}
return {clock_ms(), fields[1] or false, fields[2] or false, fields[3] or false, fields[4] or false}
""",
    "CLAIM": """
-- KEYS: room, pairing, paired, cancelled. ARGV: namespace, id, owner, generations, claim_ms, keep_ms, max_rooms.
-- Returns {1, base, malformed} when the room is claimed, {0, age_ms, 0} when it is in use.
for at = 2, 4 do own(KEYS[at], 'zset') end
local malformed = own(KEYS[1], 'hash')
local now_ms = clock_ms()
local known = redis.call('HMGET', KEYS[1], 'state', 'generation', 'claimed_ms')
local age_ms = math.max(0, now_ms - (tonumber(known[3]) or 0))
if known[1] == 'paired' or (known[1] == 'pairing' and age_ms < tonumber(ARGV[5])) then return {0, age_ms, 0} end
local base = 0
if known[2] then
  local found = tonumber(known[2])
  if found and found >= 0 and found < 2^53 then base = math.floor(found) else malformed = 1 end
end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'generation', base + ARGV[4], 'owner', ARGV[3], 'claimed_ms', now_ms)
redis.call('PEXPIRE', KEYS[1], ARGV[6])
move(KEYS[1], ARGV[2], 2, 'pairing', now_ms + ARGV[6])
local settled = redis.call('ZCARD', KEYS[3]) + redis.call('ZCARD', KEYS[4])
if settled + redis.call('ZCARD', KEYS[2]) > tonumber(ARGV[7]) and settled > 0 then
  local paired = redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')
  local cancelled = redis.call('ZRANGE', KEYS[4], 0, 0, 'WITHSCORES')
  local oldest, from = paired, KEYS[3]
  if #paired == 0 or (#cancelled > 0 and tonumber(cancelled[2]) < tonumber(paired[2])) then
    oldest, from = cancelled, KEYS[4]
  end
  redis.call('ZREM', from, oldest[1])
  redis.call('DEL', ARGV[1] .. 'room:' .. oldest[1])
end
return {1, base, malformed}
""",
    "SETTLE": """
-- KEYS as of CLAIM, prefixes, then those of prefixes.
-- ARGV: id, owner, generation, ticket, note_keep_ms, instances kept, instance, instance, notes kept, namespace.
-- Returns 1 when the ticket is kept.
if read('HGET', KEYS[1], 'owner') ~= ARGV[2] then return 0 end
local now_ms = clock_ms()
redis.call('HSET', KEYS[1], 'generation', ARGV[3], 'ticket', ARGV[4], 'settled_ms', now_ms)
move(KEYS[1], ARGV[1], 3, 'paired', forgotten_ms(KEYS[1]))
if #KEYS == 5 then return 1 end
own(KEYS[5], 'zset')
for at = 6, #KEYS do
  own(KEYS[at], 'zset')
  redis.call('ZADD', KEYS[at], now_ms, ARGV[7], now_ms, ARGV[8])
  redis.call('ZREMRANGEBYRANK', KEYS[at], 0, -1 - ARGV[6])
  redis.call('PEXPIRE', KEYS[at], ARGV[5])
  redis.call('ZADD', KEYS[5], now_ms, string.sub(KEYS[at], -32))
end
redis.call('PEXPIRE', KEYS[5], ARGV[5])
-- More than one ticket adds, so what is too much or too old goes in time, and no step takes long.
local old = redis.call('ZRANGEBYSCORE', KEYS[5], '-inf', now_ms - ARGV[5], 'LIMIT', 0, 64)
local over = math.min(redis.call('ZCARD', KEYS[5]) - ARGV[9], 64)
if over > #old then old = redis.call('ZRANGE', KEYS[5], 0, over - 1) end
for _, key in ipairs(old) do
  redis.call('ZREM', KEYS[5], key)
  redis.call('DEL', ARGV[10] .. 'prefix:' .. key)
end
return 1
""",
    "GIVE_UP": """
-- KEYS as of CLAIM. ARGV: id, owner, generation.
if read('HGET', KEYS[1], 'owner') ~= ARGV[2] then return end
redis.call('HSET', KEYS[1], 'generation', ARGV[3])
move(KEYS[1], ARGV[1], 4, 'cancelled', forgotten_ms(KEYS[1]))
""",
    "CANCELLED": """
-- KEYS as of CLAIM. ARGV: id, generation.
local known = read('HMGET', KEYS[1], 'state', 'generation')
if not known or known[1] ~= 'paired' or known[2] ~= ARGV[2] then return end
move(KEYS[1], ARGV[1], 4, 'cancelled', forgotten_ms(KEYS[1]))
""",
    "NOTED": """
-- KEYS: prefixes. Returns msgpack: [now_ms, [[instance, given_ms, instance, given_ms, ...], ...]], a list for each key.
local found = {}
for at, key in ipairs(KEYS) do found[at] = read('ZRANGE', key, 0, -1, 'WITHSCORES') or {} end
return cmsgpack.pack({clock_ms(), found})
""",
    "COUNTS": """
-- KEYS: pairing, paired, cancelled. Forgets rooms by age and returns how many are in each state.
local now_ms, counts = clock_ms(), {}
for at, key in ipairs(KEYS) do
  own(key, 'zset')
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now_ms)
  counts[at] = redis.call('ZCARD', key)
end
return counts
""",
}
