-- The first of two single-key steps that stand in for `invalidate` while a cluster slot moves: a script over two keys
-- can then be answered TRYAGAIN for as long as the move lasts. The second step is a plain UNLINK of the value key.
--
-- KEYS   1 entry key
-- ARGV   1 source   2 epoch   3 position   4 how long the floor must live at least, in ms
-- Reply  0 a repeat: the floor of this source is already there or above, and nothing is owed; leave the value alone
--        1 the floor is raised, the mark erased and the unlink noted as owed: unlink the value now
--
-- Atomic: comparing and raising the floor, erasing the mark, noting the debt. Floor and debt must appear together: with
-- the floor alone, whoever died before the second step would find its own repeat skipped and the old value still there.
-- Order of the steps: the entry first. With the value unlinked first, a fill whose mark is not yet erased would put the
-- old value back between the two. The note is cleared by a fill, by `forget` and by the next `invalidate`, never by the
-- second step, so a crash after that costs one needless unlink and nothing else.
--
-- One HSET is the only write that can be refused (memory is full), and it is the first. No shebang line, on purpose:
-- with one, Redis refuses repeats too.

local source, epoch, position, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

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
if source == '' then return redis.error_reply('ERR recant owe: the source is empty') end
if not (canonical(epoch) and canonical(position)) then
  return redis.error_reply('ERR recant owe: epoch and position are not canonical decimals')
end
-- 13 digits of milliseconds are 317 years; beyond that PEXPIRE itself could fail.
if #ttl > 13 or not string.find(ttl, '^[1-9]%d*$') then
  return redis.error_reply('ERR recant owe: the ttl is not a positive number of milliseconds')
end

local entry = redis.call('HMGET', KEYS[1], 's', 'e', 'p', 'u')
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
    if not owed then return 0 end
    -- Only the unlink is missing. The floor stays where it is: within one source it never goes down.
    epoch, position = floor_epoch, floor_position
  end
end

redis.call('HSET', KEYS[1], 's', source, 'e', epoch, 'p', position, 'm', '', 'u', '1')
-- The entry's life only ever grows. One without any expiry (-1) has just been made and is given one.
if redis.call('PTTL', KEYS[1]) < tonumber(ttl) then redis.call('PEXPIRE', KEYS[1], ttl) end
return 1
