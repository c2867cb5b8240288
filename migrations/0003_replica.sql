-- What a reader of a replica needs beside its value: a version that is not newer than what its query will see.
--
-- Call it on the replica BEFORE the query: the replay position only grows, so the query's snapshot is at least as new as the version, and a
-- fill with it is refused when a newer invalidation was applied meanwhile. The epoch is the replicated one.
create function recant.replica_position(out epoch bigint, out "position" bigint) returns record
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    if not pg_is_in_recovery() then
        raise exception 'this server is not a replica'
            using errcode = 'object_not_in_prerequisite_state', hint = 'Reads on the primary fill without a version.';
    end if;
    -- Position first: should replay bring a new epoch between the two, the pair is (new epoch, old position), which no snapshot contradicts.
    "position" := (pg_last_wal_replay_lsn() - '0/0'::pg_lsn)::bigint;
    select source.epoch into epoch from recant.source;
    if epoch is null then
        raise exception 'this database has no epoch yet'
            using errcode = 'object_not_in_prerequisite_state', hint = 'Start a relay on the primary; it raises the first epoch.';
    end if;
end
$$;

comment on function recant.replica_position() is
    'On a replica, before the query: (epoch, position) for a cache fill. An error (55000) on a primary, or before the first epoch.';
