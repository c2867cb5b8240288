-- The schema recant: what a product service writes into, and what the relay claims from. PostgreSQL 15 to 18.
--
-- Forward only: a migration that has been released is never edited, the next one corrects it. `relay migrate` runs these files under an advisory
-- lock and keeps its own list in recant.migrations, so two relays may start it at once.

do $$
begin
    if current_setting('server_version_num')::int not between 150000 and 189999 then
        raise exception 'recant needs PostgreSQL 15 to 18, this is %', current_setting('server_version')
            using errcode = 'feature_not_supported', hint = 'Install recant in a database of a supported server.';
    end if;
    -- A key is counted in bytes and judged by code points, and both have to come out as the relay and every cache client see them.
    if getdatabaseencoding() <> 'UTF8' then
        raise exception 'recant needs a database with encoding UTF8, this one has %', getdatabaseencoding()
            using errcode = 'feature_not_supported', hint = 'Create one with: create database … encoding ''UTF8'' template template0';
    end if;
end
$$;

create schema if not exists recant;
comment on schema recant is 'Cache invalidations: product services call recant.invalidate, the relay claims from recant.outbox';

-- Written in the writer's own transaction, deleted by the relay in the transaction that claimed it, once Kafka has acknowledged the record.
--
-- Hardly any constraints: recant.invalidate checks its arguments, and whatever gets in by another way must not break the write that brings
-- it. The relay sets such rows aside. The table is logged: the relay's delete must write WAL before the claim is stamped with the log position.
create table recant.outbox (
    id bigint generated always as identity primary key,
    key text,
    tenant text,
    class text,
    regions text[],
    lane text default 'realtime',
    traceparent text,
    -- The wall clock and not the transaction's start: where commit times are not tracked, this is the nearest known point before the commit.
    created_at timestamptz not null default clock_timestamp()
) with (
    -- Every row lives for milliseconds and then is dead. A share of the table says nothing, since the table is empty most of the time.
    autovacuum_vacuum_scale_factor = 0,
    -- 10,000 dead rows are some 150 pages: cheap to clean, and far below the 200,000 at which claiming was measured 3.5 times slower.
    autovacuum_vacuum_threshold = 10000,
    -- Without pauses: the table is small, and each pause keeps dead rows in the way of the claims.
    autovacuum_vacuum_cost_delay = 0,
    -- Rows are deleted as fast as they come, so a vacuum for inserts alone (freezing) never pays. -1 switches it off.
    autovacuum_vacuum_insert_threshold = -1,
    -- Statistics of a queue are wrong as soon as they are taken, and the relay does not depend on them (it pins its plan). 2^31-1 is the
    -- largest value there is; a fresh analyze would only throw away cached plans.
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 2147483647,
    -- Cutting the file needs an exclusive lock that writers would wait for; the pages are needed again a moment later anyway.
    vacuum_truncate = off
);
comment on table recant.outbox is 'Committed invalidations that Kafka does not have yet; write through recant.invalidate only';
comment on column recant.outbox.id is 'For scanning, never for ordering: a lower id can commit later';

-- Outbox rows that no retry can publish. The relay moves them here in the transaction that claimed them.
create table recant.set_aside (
    id bigint generated always as identity primary key,
    row jsonb not null,
    reason text not null,
    at timestamptz not null default clock_timestamp()
);
comment on table recant.set_aside is 'Outbox rows that could not be published, with the reason; long texts are cut';

-- The regions that invalidations may be pinned to. `relay migrate` registers the configured ones. The check is that of the code which
-- builds topic names: "bulk" ends the names of the bulk lane's topics.
create table recant.region (
    name text primary key check (name ~ '^[a-z0-9][a-z0-9-]{0,31}$' and name <> 'bulk')
);
comment on table recant.region is 'Known regions; recant.invalidate refuses others';

-- The newest epoch of this source. Logged, so that a replica reads it and a crash keeps it. Empty until a relay first claims, which raises the epoch.
create table recant.source (
    only_row boolean primary key default true check (only_row),
    epoch bigint not null check (epoch > 0),
    cause text not null,
    raised_at timestamptz not null default clock_timestamp(),
    timeline int not null,
    started_at timestamptz not null,
    -- Where it was raised. Found elsewhere, this is a copy, and the original's later commits are not in it. The oid alone does not tell: the first
    -- database that is made in a cluster has the same one everywhere.
    cluster bigint not null,
    database oid not null
);
comment on column recant.source.cluster is 'The cluster''s system identifier (pg_control_system)';
comment on table recant.source is 'The newest epoch of this database''s log, and how it came about';

-- The same epoch, vouched for by this very run of this very database. Unlogged on purpose: crash recovery and promotion empty it, and that is the
-- sign that log positions may have started again lower. A restart or a copy keeps the row, but no longer matches its start time or oid.
create unlogged table recant.incarnation (
    only_row boolean primary key default true check (only_row),
    epoch bigint not null,
    started_at timestamptz not null,
    database oid not null
);
comment on table recant.incarnation is 'Unlogged: empty or not matching means that the epoch has to be raised before anything is claimed';

-- Rows for a login limit it to these key prefixes and tenants. No rows: unlimited.
create table recant.writer_scope (
    role name not null,
    key_prefix text not null,
    tenant text,
    unique nulls not distinct (role, key_prefix, tenant)
);
comment on table recant.writer_scope is
    'Which keys a login (session_user) may invalidate: key begins with key_prefix, and tenant is null (any) or equals the argument; no row for a login: all';
