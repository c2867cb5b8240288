-- Fill one key after a miss, unless an invalidation came in between.
--
-- KEYS   1 value key   2 entry key, in the same slot
-- ARGV   1 mark, as `read` gave it   2 value   3 how long the value may live, in ms
--        4 source   5 epoch   6 position: where the database snapshot stood that the value was read from, taken before
--          the query; all three '' for a read from the primary whose snapshot is younger than the mark
-- Reply   1 filled
--         0 refused: the entry does not hold this mark (erased by an invalidation, evicted, expired, lost)
--        -1 refused: the version is below the floor, or of another source than the floor and so not comparable
--
-- Atomic: comparing mark and floor, and setting the value. An invalidation between them would delete nothing and then
-- find the old value set behind its back, with nobody left to delete it.
--
-- A fill never raises the floor. A floor says that invalidations up to it were applied, which a fill cannot know: with
-- it raised, an invalidation still on its way would count as a repeat and leave what an older fill puts in afterwards.
-- The mark stays: a second reader of the same miss has seen no invalidation either.
--
-- No shebang line, on purpose: Redis then refuses, when memory is full, exactly the SET, and nothing has changed.

local mark, value, ttl, source, epoch, position = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

-- A canonical decimal has one spelling. Others ('007', '1e3') would compare wrongly below.
local function canonical(text)
  return text == '0' or string.find(text, '^[1-9]%d*$') ~= nil
end

-- Canonical decimals compare by length and then as text, never as Lua numbers, which are doubles and cannot tell 2^53
-- from 2^53 + 1. Text of equal length made of digits alone sorts the same under every collation of the server.
local function below(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end

if #ttl > 13 or not string.find(ttl, '^[1-9]%d*$') then
  return redis.error_reply('ERR recant fill: the ttl is not a positive number of milliseconds')
end
local versioned = source ~= ''
if versioned and not (canonical(epoch) and canonical(position)) then
  return redis.error_reply('ERR recant fill: epoch and position are not canonical decimals')
end
if not versioned and (epoch ~= '' or position ~= '') then
  return redis.error_reply('ERR recant fill: a version without its source')
end

local entry = redis.call('HMGET', KEYS[2], 's', 'e', 'p', 'm', 'u')
local floor_source, floor_epoch, floor_position = entry[1], entry[2], entry[3]
local held, owed = entry[4], entry[5] == '1'

-- An erased mark is an empty one, so an empty mark permits nothing.
if mark == '' or held ~= mark then return 0 end
if versioned and floor_source then
  if floor_source ~= source then return -1 end
  if below(epoch, floor_epoch) then return -1 end
  if epoch == floor_epoch and below(position, floor_position) then return -1 end
end

redis.call('SET', KEYS[1], value, 'PX', ttl)
-- What was owed is the unlink of an older value. This one passed mark and floor, so it is not that value; were the note
-- kept, the repeat of the same invalidation would delete a fresh value.
if owed then redis.call('HDEL', KEYS[2], 'u') end
return 1
