-- recant.invalidate: the one call that a product service makes, inside its own transaction.
--
--  SQLSTATE | refused because                                         | remedy
--  ---------+---------------------------------------------------------+--------------------------------------------------------
--  RC001    | the key is null or empty                                | name the cache entry
--  RC002    | the key has more than 250 bytes                         | hash the long part
--  RC003    | the key has white space or control characters           | percent-encode them
--  RC004    | the key has a } but no hash tag beside other text       | put {tag} before the rest, or use no braces
--  RC005    | the lane is neither realtime nor bulk                   | pass one of them, or leave it out
--  RC006    | the class is none of C1, C2, C3, C4                     | pass one of them, or leave it out
--  RC007    | a region is not in recant.region, or the list is empty  | register it (relay migrate), or pass null for all regions
--  RC008    | recant.writer_scope does not allow this login the key   | add a row to recant.writer_scope, or use another login
--  RC009    | the tenant is empty, over 128 bytes, or has white space | pass the tenant's identifier
--  RC010    | the key begins with recant:                             | choose another prefix
--
-- These codes are stable. A call that raises leaves no row, and after a savepoint the transaction can go on.
--
-- All of this is on the product's write path, so the common call (printable ASCII key, realtime, nothing else) is three simple expressions and
-- one insert. Everything else waits in helpers that only run when the short test does not settle the matter.
--
-- search_path is fixed and ends in pg_temp: the functions run with their owner's rights, and nobody may slip another table or operator under them.

-- Raises what is wrong with a key; does nothing when it is good. The same rules in the same order as recant_schema::key::Key::parse.
create function recant.check_key(key text) returns void
    language plpgsql immutable parallel safe
    set search_path = pg_catalog, pg_temp
as $$
declare
    shown constant text := 'Key: ' || coalesce(quote_literal(left(key, 80)), 'null');
begin
    if key is null or key = '' then
        raise exception 'the key is %', case when key is null then 'null' else 'empty' end
            using errcode = 'RC001', hint = 'Name the cache entry, for example v2:shop:product:7.';
    end if;
    -- The storefront's limit for cache keys.
    if octet_length(key) > 250 then
        raise exception 'the key has % bytes, at most 250 are allowed', octet_length(key)
            using errcode = 'RC002', detail = shown, hint = 'Hash the long part.';
    end if;
    -- Unicode's Cc and White_Space, spelled out: \s depends on the locale, and this has to agree with what the relay and the subscribers refuse.
    if key collate "C" ~ '[\u0001-\u0020\u007f-\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]' then
        raise exception 'the key has white space or a control character'
            using errcode = 'RC003', detail = shown, hint = 'Percent-encode it.';
    end if;
    -- Redis Cluster hashes what stands between the first { and the first } after it, if anything does. Without such a tag the tombstone wraps
    -- the whole key in braces, and a } inside would end that tag early: key and tombstone would live in two slots. And {a} alone would share its
    -- tombstone with the key a.
    if strpos(key, '}') > 0 and (key collate "C" !~ '^[^{]*\{[^}]+\}' or key collate "C" ~ '^\{[^}]+\}$') then
        raise exception 'the key has a closing brace but no hash tag beside other text'
            using errcode = 'RC004', detail = shown, hint = 'Use {tag} with a non-empty tag and more text, before any other closing brace, or no braces.';
    end if;
    if starts_with(key, 'recant:') then
        raise exception 'keys that begin with recant: belong to Recant itself'
            using errcode = 'RC010', detail = shown, hint = 'Choose another prefix.';
    end if;
end
$$;

-- Raises what is wrong with the optional arguments.
create function recant.check_arguments(tenant text, class text, regions text[], lane text) returns void
    language plpgsql stable
    set search_path = pg_catalog, pg_temp
as $$
declare
    unknown text;
begin
    if lane is not null and lane not in ('realtime', 'bulk') then
        raise exception 'the lane % is not known', quote_literal(left(lane, 80))
            using errcode = 'RC005', hint = 'Lanes are realtime (the default) and bulk.';
    end if;
    if class is not null and class not in ('C1', 'C2', 'C3', 'C4') then
        raise exception 'the class % is not known', quote_literal(left(class, 80))
            using errcode = 'RC006', hint = 'Classes are C1, C2, C3 and C4; null when it does not matter.';
    end if;
    if tenant is not null and (
        tenant = '' or octet_length(tenant) > 128
        or tenant collate "C" ~ '[\u0001-\u0020\u007f-\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]'
    ) then
        raise exception 'the tenant is empty, longer than 128 bytes, or has white space or control characters'
            using errcode = 'RC009', detail = 'Tenant: ' || quote_literal(left(tenant, 80)), hint = 'Pass the tenant''s identifier, or null.';
    end if;
    if regions is not null then
        -- An empty list would invalidate nowhere, which is never what a writer means.
        if cardinality(regions) = 0 or array_ndims(regions) <> 1 then
            raise exception 'the list of regions is %', case when cardinality(regions) = 0 then 'empty' else 'not one-dimensional' end
                using errcode = 'RC007', hint = 'Name the regions, or pass null for all of them.';
        end if;
        select left(string_agg(coalesce(quote_literal(wanted.name), 'null'), ', '), 200) into unknown
        from unnest(regions) as wanted (name)
        where not exists (select from recant.region known where known.name = wanted.name);
        if unknown is not null then
            raise exception 'not a known region: %', unknown
                using errcode = 'RC007',
                      detail = 'Known: ' || coalesce((select left(string_agg(name, ', ' order by name), 200) from recant.region), 'none') || '.',
                      hint = 'Add it to the relay''s configuration and run relay migrate, or correct the name.';
        end if;
    end if;
end
$$;

-- Raises RC008, in one place for both overloads.
create function recant.refuse_scope(key text, tenant text) returns void
    language plpgsql
    set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception 'the login % may not invalidate this key', quote_ident(session_user)
        using errcode = 'RC008',
              detail = 'Key: ' || quote_literal(left(key, 80)) || ', tenant: ' || coalesce(quote_literal(left(tenant, 80)), 'null'),
              hint = 'Ask for a row in recant.writer_scope that covers key and tenant, or use the login of the service that owns the key.';
end
$$;

create function recant.invalidate(
    key text,
    tenant text default null,
    class text default null,
    regions text[] default null,
    lane text default 'realtime',
    traceparent text default null
) returns void
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp
as $$
begin
    -- Printable ASCII without } breaks none of the other rules. Null fails the test as well.
    if (key collate "C" ~ '^[!-|~]+$' and octet_length(key) <= 250 and not starts_with(key, 'recant:')) is not true then
        perform recant.check_key(key);
    end if;
    if tenant is not null or class is not null or regions is not null or lane <> 'realtime' then
        perform recant.check_arguments(tenant, class, regions, lane);
    end if;

    -- The login's scope is judged in the insert itself: a statement of its own would cost as much as the insert does. session_user, since
    -- current_user is the owner in here. bool_or over no rows is null: no rows, no limit.
    insert into recant.outbox (key, tenant, class, regions, lane, traceparent)
    select
        invalidate.key, invalidate.tenant, invalidate.class, invalidate.regions, coalesce(invalidate.lane, 'realtime'),
        -- W3C Trace Context: what is not valid is ignored, never an error. Longer forms of later versions are ignored too, so the column is bounded.
        case
            when invalidate.traceparent ~ '^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$'
            then invalidate.traceparent
        end
    where coalesce(
        (
            select bool_or(starts_with(invalidate.key, scope.key_prefix) and (scope.tenant is null or scope.tenant = invalidate.tenant) is true)
            from recant.writer_scope scope
            where scope.role = session_user
        ),
        true
    );
    if not found then
        perform recant.refuse_scope(key, tenant);
    end if;
end
$$;

create function recant.invalidate(
    keys text[],
    tenant text default null,
    class text default null,
    regions text[] default null,
    lane text default 'realtime',
    traceparent text default null
) returns void
    language plpgsql volatile security definer
    set search_path = pg_catalog, pg_temp
as $$
declare
    refused text;
begin
    -- array_agg over no rows is null: both spellings of "no keys" do nothing.
    if coalesce(cardinality(keys), 0) = 0 then
        return;
    end if;
    -- A null element is refused (RC001): it stands for a key that the writer meant and did not build.
    perform recant.check_key(wanted.key)
    from unnest(keys) as wanted (key)
    where (wanted.key collate "C" ~ '^[!-|~]+$' and octet_length(wanted.key) <= 250 and not starts_with(wanted.key, 'recant:')) is not true;
    if tenant is not null or class is not null or regions is not null or lane <> 'realtime' then
        perform recant.check_arguments(tenant, class, regions, lane);
    end if;
    -- All or nothing: one key outside the scope refuses the call.
    if exists (select from recant.writer_scope scope where scope.role = session_user) then
        select min(wanted.key) into refused
        from unnest(keys) as wanted (key)
        where not exists (
            select from recant.writer_scope scope
            where scope.role = session_user
              and starts_with(wanted.key, scope.key_prefix)
              and (scope.tenant is null or scope.tenant = invalidate.tenant)
        );
        if refused is not null then
            perform recant.refuse_scope(refused, tenant);
        end if;
    end if;

    insert into recant.outbox (key, tenant, class, regions, lane, traceparent)
    select distinct
        wanted.key collate "C", invalidate.tenant, invalidate.class, invalidate.regions, coalesce(invalidate.lane, 'realtime'),
        case
            when invalidate.traceparent ~ '^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$'
            then invalidate.traceparent
        end
    from unnest(invalidate.keys) as wanted (key);
end
$$;

comment on function recant.invalidate(text, text, text, text[], text, text) is
$$Tells every region's cache that what it holds for the key is older than this transaction.
Call it in the transaction that changes the row. tenant: isolation label. class: C1 to C4. regions: residency, null for all.
lane: realtime or bulk. traceparent: W3C trace context, ignored when not valid.
Errors: RC001 key null or empty; RC002 key over 250 bytes; RC003 white space or control characters in the key; RC004 closing brace
without hash tag; RC005 unknown lane; RC006 unknown class; RC007 unknown region or empty list; RC008 outside recant.writer_scope;
RC009 tenant empty, over 128 bytes or with white space; RC010 key begins with recant:. Each has a hint; none leaves a row.$$;

comment on function recant.invalidate(text[], text, text, text[], text, text) is
$$The same for several keys at once: repeats are written once, a null or empty array does nothing, and a null element (RC001) or any other
refused key refuses the whole call. Errors as for recant.invalidate(text).$$;
