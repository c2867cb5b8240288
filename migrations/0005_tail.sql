-- What the relay's tail listens to: that something was inserted into the outbox, and nothing about it.
--
-- Inserts only, since the relay's own deletes would wake it for nothing. Of the columns only the id, because a stream must carry at least one: keys and
-- tenants do not leave the server this way. A server whose wal_level is below logical takes the publication with a warning, and wake-ups come
-- from the timer there.
create publication recant_tail for table recant.outbox (id) with (publish = 'insert');
comment on publication recant_tail is 'Wakes the relay; no data is taken from it. Without it the relay falls back to a timer';
