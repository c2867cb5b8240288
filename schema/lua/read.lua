-- Read one key, and on a miss leave the mark that a fill needs.
--
-- KEYS   1 value key   2 entry key, in the same slot
-- ARGV   1 nonce: 128 random bits of this reader, as text, never empty
--        2 how long the mark must live at least, in ms
--        3 '1' to be given a mark although a value is there (refresh ahead), else ''
-- Reply  an array: the value or nil, and with a mark also the mark and whether this reader left it
--        {value}               a hit
--        {value|nil, mark, 1}  this reader left the mark: let it load
--        {value|nil, mark, 0}  another reader left it: wait for its fill, or load as well
--        {nil}                 a miss for which memory is too full to leave a mark: load, do not fill
--
-- Atomic: seeing that no value is there and leaving the mark. Were an invalidation to run between the two, a reader
-- could not tell whether its mark is younger than the invalidation, and the mark would outlive what should have erased it.
-- A reader must take its database snapshot after this reply. The first mark stays until something erases it, so all
-- readers of one miss share it, and whichever of them loads first may fill.
--
-- No shebang line, on purpose: with one, Redis refuses the whole script when memory is full, a hit included. Without
-- one it refuses the first write that can grow memory, which is caught below.

local nonce, ttl, refresh = ARGV[1], ARGV[2], ARGV[3]

-- Everything that can be wrong is found before the first write: Redis does not undo the writes of a script that fails.
if nonce == '' then return redis.error_reply('ERR recant read: the nonce is empty') end
-- 13 digits of milliseconds are 317 years; beyond that PEXPIRE itself could fail.
if #ttl > 13 or not string.find(ttl, '^[1-9]%d*$') then
  return redis.error_reply('ERR recant read: the ttl is not a positive number of milliseconds')
end

local value = redis.call('GET', KEYS[1])
if value and refresh ~= '1' then return { value } end

local mark, left = redis.call('HGET', KEYS[2], 'm'), 0
if not mark or mark == '' then
  local written = redis.pcall('HSET', KEYS[2], 'm', nonce)
  if type(written) == 'table' and written.err then
    if string.sub(written.err, 1, 3) == 'OOM' then return { value } end
    return written
  end
  mark, left = nonce, 1
end

-- The entry's life only ever grows: a floor in it must not die early because a reader asked for less. The mark of
-- another reader is prolonged too, so that every mark handed out lives for the time asked for. An entry without any
-- expiry (-1: just made, or made persistent by hand) is given one, for nothing here may stay for ever.
if redis.call('PTTL', KEYS[2]) < tonumber(ttl) then redis.call('PEXPIRE', KEYS[2], ttl) end
return { value, mark, left }
