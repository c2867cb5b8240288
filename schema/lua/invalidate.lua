-- Invalidate one key: what the cache holds for it is older than this version.
--
-- KEYS   1 value key   2 entry key, in the same slot
-- ARGV   1 source   2 epoch   3 position   4 how long the floor must live at least, in ms
--        5 'always', or 'when-cached' to write nothing when neither value nor entry is there
-- Reply  0 a repeat: the floor of this source is already there or above; nothing changed
--        1 applied, no value was there
--        2 applied, and a value was unlinked
--        3 nothing there to invalidate ('when-cached' only); nothing written
--
-- Atomic: comparing the floor, raising it, erasing the mark and unlinking the value. A fill between the unlink and the
-- erased mark would put the old value back; a second invalidation between the comparison and the raised floor could be
-- lowered by this one.
--
-- Order: floor and mark change in one HSET, which is the first write. It is the only one that can be refused (memory is
-- full, too few replicas, a failed snapshot), so a refusal leaves everything as it was. Were the value unlinked first,
-- Redis would take the script for one that has begun and let it grow past its memory limit.
-- No shebang line, on purpose: with one, Redis refuses repeats too when memory is full.

local source, epoch, position, ttl, mode = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

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

-- Everything that can be wrong is found before the first write: Redis does not undo the writes of a script that fails.
if source == '' then return redis.error_reply('ERR recant invalidate: the source is empty') end
if not (canonical(epoch) and canonical(position)) then
  return redis.error_reply('ERR recant invalidate: epoch and position are not canonical decimals')
end
-- 13 digits of milliseconds are 317 years; beyond that PEXPIRE itself could fail.
if #ttl > 13 or not string.find(ttl, '^[1-9]%d*$') then
  return redis.error_reply('ERR recant invalidate: the ttl is not a positive number of milliseconds')
end
if mode ~= 'always' and mode ~= 'when-cached' then
  return redis.error_reply("ERR recant invalidate: the mode is neither 'always' nor 'when-cached'")
end

local entry = redis.call('HMGET', KEYS[2], 's', 'e', 'p', 'u')
local floor_source, floor_epoch, floor_position, owed = entry[1], entry[2], entry[3], entry[4] == '1'

-- Positions of two sources never compare: another source's floor neither covers this version nor survives it.
if floor_source == source then
  local covered
  if floor_epoch == epoch then
    covered = not below(floor_position, position)
  else
    covered = below(epoch, floor_epoch)
  end
  if covered then
    -- A value that is there now was filled after the first time, so a repeat must not delete it.
    if not owed then return 0 end
    -- Only the unlink is missing. The floor stays where it is: within one source it never goes down.
    epoch, position = floor_epoch, floor_position
  end
end

if mode == 'when-cached' and redis.call('EXISTS', KEYS[1], KEYS[2]) == 0 then return 3 end

redis.call('HSET', KEYS[2], 's', source, 'e', epoch, 'p', position, 'm', '')
if owed then redis.call('HDEL', KEYS[2], 'u') end
-- The entry's life only ever grows. One without any expiry (-1) has just been made and is given one.
if redis.call('PTTL', KEYS[2]) < tonumber(ttl) then redis.call('PEXPIRE', KEYS[2], ttl) end
return 1 + redis.call('UNLINK', KEYS[1])
