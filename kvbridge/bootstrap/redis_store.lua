-- The steps of RedisStore. Redis runs each script as one step: a script is the part before the first `---`, and one of the parts
-- behind it, whose answer is packed. The limits (expire_ms, max_rooms, ...) are locals that RedisStore puts in front.
--
-- Keys, behind the namespace (`member` is the JSON list of instance and node):
--
--   nodes                sorted set: registered members, by the time at which they have been silent for too long
--   node:<member>        hash: incarnation, entry, digest (of the entry), beat, seen_ms, charges; expires with the node
--   version:<instance>   string: drawn anew by each registration of the instance
--   room:<id>            hash: state, generation, owner, claimed_ms, paired_in, settled_ms, ticket; expires with the room
--   pairing, paired, cancelled   sorted sets: rooms in that state, by the time at which they are forgotten
--   prefix:<key>         sorted set: instances that were given a prompt that begins so, by time; expires when no such prompt comes
--   prefixes             sorted set: the page keys of all prefix:<key>, by the time of the last note; expires with the last of them
--
-- All times are Redis's own, in milliseconds. A value of another type under one of these names is read as absent, and replaced by a
-- write. Arguments come by name in `a`.
local ns, a = KEYS[1], cmsgpack.unpack(ARGV[1])
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function read(...)  -- nil for a key of another type
  local found = redis.pcall(...)
  if type(found) == 'table' and found.err then return nil end
  return found
end
local function own(kind, name)  -- the key of a name, once a value of another type is deleted
  local key = ns .. name
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
  return key
end
local function row(member)  -- a missing field is false; nil when all are missing
  local fields = read('HMGET', ns .. 'node:' .. member, 'incarnation', 'digest', 'beat', 'seen_ms', 'charges') or {}
  return (fields[1] or fields[2] or fields[3] or fields[4]) and fields or nil
end
local function live_on(node)
  redis.call('PEXPIRE', node, expire_ms)
  redis.call('ZADD', own('zset', 'nodes'), now_ms + expire_ms, a.member)
  redis.call('PEXPIRE', ns .. 'nodes', 3600000)  -- for so long a bootstrap that comes back logs nodes lost meanwhile
end
return cmsgpack.pack((function()

--- LOOK: [now_ms, [[member, row], ...], version]
local found = {}
for _, member in ipairs(a.members or read('ZRANGE', ns .. 'nodes', 0, -1) or {}) do
  local fields = string.sub(member, 1, #a.prefix) == a.prefix and row(member)
  if fields then found[#found + 1] = {member, fields} end
end
return {now_ms, found, read('GET', ns .. 'version:' .. a.instance) or ''}

--- ENTRIES
local found = {}
for at, member in ipairs(a.members) do found[at] = read('HGET', ns .. 'node:' .. member, 'entry') or '' end
return found

--- PUT
local version, node = ns .. 'version:' .. a.instance, ns .. 'node:' .. a.member
if (read('GET', version) or '') ~= a.version then return false end
redis.call('SET', version, a.drawn, 'PX', 3600000)
redis.call('DEL', node)
for name, value in pairs(a.fields) do redis.call('HSET', node, name, value) end
redis.call('HSET', node, 'seen_ms', now_ms)
live_on(node)
return true

--- BEAT: As LOOK, as it is afterwards
local node, fields = ns .. 'node:' .. a.member, row(a.member)
if not fields or redis.call('HEXISTS', node, 'entry') == 0 then return {now_ms, {}, ''} end
if fields[1] == a.incarnation then
  redis.call('HSET', node, 'beat', a.beat, 'seen_ms', now_ms)
  redis.call('HDEL', node, 'charges')
  live_on(node)
  fields = row(a.member)
end
return {now_ms, {{a.member, fields}}, ''}

--- REMOVE
if read('HGET', ns .. 'node:' .. a.member, 'incarnation') ~= a.incarnation then return false end
redis.call('DEL', ns .. 'node:' .. a.member)
redis.call('ZREM', own('zset', 'nodes'), a.member)
return true

--- CHARGE
for member, counts in pairs(a.counts) do
  local fields = row(member)
  if fields then
    local whole, charges = pcall(cmsgpack.unpack, fields[5] or '')
    if not whole or type(charges) ~= 'table' then charges = {} end
    for name, more in pairs(counts) do charges[name] = (tonumber(charges[name]) or 0) + more end
    redis.call('HSET', ns .. 'node:' .. member, 'charges', cmsgpack.pack(charges))
  end
end

--- EXPIRE: Each member to one caller
local gone = redis.call('ZRANGEBYSCORE', own('zset', 'nodes'), '-inf', now_ms)
redis.call('ZREMRANGEBYSCORE', ns .. 'nodes', '-inf', now_ms)
return gone

--- CLAIM: [true, base], or [false, age_ms] when the room is in use
local pairing, paired, cancelled = own('zset', 'pairing'), own('zset', 'paired'), own('zset', 'cancelled')
local room = own('hash', 'room:' .. a.room)
local known = redis.call('HMGET', room, 'state', 'generation', 'claimed_ms')
local age_ms = math.max(0, now_ms - (tonumber(known[3]) or 0))
if known[1] == 'paired' or (known[1] == 'pairing' and age_ms < claim_ms) then return {false, age_ms} end
local base = math.floor(tonumber(known[2]) or 0)
if not (base >= 0 and base < 2^53) then base = 0 end
redis.call('DEL', room)
redis.call('HSET', room, 'state', 'pairing', 'generation', base + a.generations, 'owner', a.owner, 'claimed_ms', now_ms)
redis.call('PEXPIRE', room, keep_ms)
redis.call('ZREM', cancelled, a.room)
redis.call('ZADD', pairing, now_ms + keep_ms, a.room)
if redis.call('ZCARD', pairing) + redis.call('ZCARD', paired) + redis.call('ZCARD', cancelled) > max_rooms then
  local oldest = redis.call('ZPOPMIN', cancelled)[1] or redis.call('ZPOPMIN', paired)[1]
  if oldest then redis.call('DEL', ns .. 'room:' .. oldest) end
end
return {true, base}

--- END: Whether the room has come into the state: only if its `field` has this value
local room = ns .. 'room:' .. a.room
if read('HGET', room, a.field) ~= a.value then return false end
redis.call('HSET', room, 'state', a.state, 'generation', a.generation)
redis.call('HDEL', room, 'paired_in')
if a.ticket then redis.call('HSET', room, 'paired_in', a.generation, 'ticket', a.ticket, 'settled_ms', now_ms) end
for _, state in ipairs({'pairing', 'paired', 'cancelled'}) do redis.call('ZREM', own('zset', state), a.room) end
redis.call('ZADD', ns .. a.state, now_ms + math.max(redis.call('PTTL', room), 0), a.room)
return true

--- TICKET
local fields = read('HMGET', ns .. 'room:' .. a.room, 'state', 'generation', 'ticket', 'settled_ms') or {}
return {now_ms, fields[1] or '', fields[2] or '', fields[3] or '', fields[4] or ''}

--- COUNTS
local counts = {}
for at, state in ipairs(a.states) do
  redis.call('ZREMRANGEBYSCORE', own('zset', state), '-inf', now_ms)
  counts[at] = redis.call('ZCARD', ns .. state)
end
return counts

--- NOTE
local prefixes = own('zset', 'prefixes')
for _, name in ipairs(a.keys) do
  local key = own('zset', 'prefix:' .. name)
  for _, instance in ipairs(a.instances) do redis.call('ZADD', key, now_ms, instance) end
  redis.call('ZREMRANGEBYRANK', key, 0, -1 - note_instances)
  redis.call('PEXPIRE', key, note_keep_ms)
  redis.call('ZADD', prefixes, now_ms, name)
end
redis.call('PEXPIRE', prefixes, note_keep_ms)
-- More go than one ticket adds, so the surplus shrinks, and no step takes long.
local over = redis.call('ZCARD', prefixes) - notes
if over > 0 then
  local old = redis.call('ZPOPMIN', prefixes, math.min(over, 64))
  for at = 1, #old, 2 do redis.call('DEL', ns .. 'prefix:' .. old[at]) end
end

--- NOTED: [now_ms, [[instance, given_ms, instance, given_ms, ...], ...]], a list for each key
local found = {}
for at, name in ipairs(a.keys) do found[at] = read('ZRANGE', ns .. 'prefix:' .. name, 0, -1, 'WITHSCORES') or {} end
return {now_ms, found}
