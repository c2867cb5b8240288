-- Two roles, neither of which owns anything: grant them to the logins of product services and of relays.
--
-- Roles belong to the whole cluster. Another database of it may be migrated at the same moment, so "exists already" is fine in every form in which
-- a race can say it.
do $$
declare
    wanted text;
begin
    foreach wanted in array array['recant_writer', 'recant_relay'] loop
        if not exists (select from pg_catalog.pg_roles where rolname = wanted) then
            begin
                execute pg_catalog.format('create role %I nologin', wanted);
            exception
                when duplicate_object or unique_violation then null;
                when insufficient_privilege then
                    raise exception 'the role % is missing, and this login may not create roles', wanted
                        using errcode = 'insufficient_privilege',
                              hint = pg_catalog.format('Run as an administrator: create role %I nologin; and then relay migrate again.', wanted);
            end;
        end if;
    end loop;
end
$$;

-- Functions are executable by everybody unless that is taken away.
revoke execute on all functions in schema recant from public;

grant usage on schema recant to recant_writer, recant_relay;

-- Writers call, and read nothing: what other tenants write into the outbox is not theirs to see.
grant execute on function recant.invalidate(text, text, text, text[], text, text) to recant_writer;
grant execute on function recant.invalidate(text[], text, text, text[], text, text) to recant_writer;
grant execute on function recant.replica_position() to recant_writer;

-- Relays claim (delete, and the row locks of "for update", which need the right to update one column) and retire.
grant select, delete, update (id) on recant.outbox to recant_relay;
grant select on sequence recant.outbox_id_seq to recant_relay;
grant select, insert on recant.set_aside to recant_relay;
-- Raising the epoch replaces one row, under a lock on recant.source that needs the right to update it.
grant select, insert, update on recant.source to recant_relay;
grant select, insert, update on recant.incarnation to recant_relay;
-- For `relay check`.
grant select on recant.region, recant.writer_scope, recant.migrations to recant_relay;
