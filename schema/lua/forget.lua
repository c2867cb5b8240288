-- Forget one key without knowing a version: a writer's own delete right after its commit, a sweep, or an invalidation
-- that could not be read. The floor stays, so invalidations still on their way are judged as before.
--
-- KEYS   1 value key   2 entry key, in the same slot
-- ARGV   none
-- Reply  0 no value was there   1 a value was unlinked
--
-- Atomic: erasing the mark and unlinking the value. A fill between them, with the mark of a miss before the commit,
-- would put the old value back. The note of an owed unlink goes in the same step as the unlink, never before it.
--
-- HDEL, not HSET: this must work when memory is full, and only commands that cannot grow memory do. An entry that held
-- nothing but a mark is gone afterwards, which refuses fills just as well.

redis.call('HDEL', KEYS[2], 'm', 'u')
return redis.call('UNLINK', KEYS[1])
