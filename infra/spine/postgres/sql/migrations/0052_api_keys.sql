-- A token is a unit of text, and what opens the API is an API key.

alter table api_tokens rename to api_keys;
alter index api_tokens_pkey rename to api_keys_pkey;
alter index api_tokens_name rename to api_keys_name;

alter table audit rename column token to api_key;
alter index audit_by_token rename to audit_by_api_key;
alter table inference_usage rename column token to api_key;
alter table browser_sessions rename column token to api_key;
alter table browser_sessions rename column token_sha256 to api_key_sha256;
alter table sign_in_codes rename column token to api_key;
alter table sign_in_codes rename column token_sha256 to api_key_sha256;

-- From Postgres 18 on, "not null" is a constraint whose name comes from the table and the column.
do $$
declare
    one record;
begin
    for one in
        select t.relname as in_table, c.conname as old, format('%s_%s_not_null', t.relname, a.attname) as new
        from pg_constraint c join pg_class t on t.oid = c.conrelid
        join pg_attribute a on a.attrelid = t.oid and a.attnum = c.conkey[1]
        where c.contype = 'n' and t.relname in ('api_keys', 'inference_usage', 'browser_sessions', 'sign_in_codes')
          and t.relnamespace = current_schema()::regnamespace
    loop
        if one.old <> one.new then
            execute format('alter table %I rename constraint %I to %I', one.in_table, one.old, one.new);
        end if;
    end loop;
end $$;

-- As before, with the new name of the column.
create or replace function remove_old_rows(p_kind text, p_before timestamptz, p_most integer) returns bigint language plpgsql as $$
declare
    removed bigint := 0;
begin
    if p_kind = 'alerts' then
        delete from alerts a where a.ctid = any (array(
            select o.ctid from alerts o
            where o.channel <> '' and (o.sent_at is not null or o.due_at = 'infinity')
              and coalesce(o.sent_at, o.created_at) < p_before
            order by coalesce(o.sent_at, o.created_at) limit p_most for update skip locked));
        get diagnostics removed = row_count;
    elsif p_kind = 'uploads' then
        delete from dataset_uploads u where u.id in (
            select o.id from dataset_uploads o where is_old_upload(o, p_before)
            limit p_most for update skip locked);
        get diagnostics removed = row_count;
    elsif p_kind = 'usage' then
        with old as materialized (
            delete from inference_usage u where u.ctid = any (array(
                select o.ctid from inference_usage o
                where o.day > '-infinity' and o.day < (p_before at time zone 'utc')::date
                order by o.day limit p_most for update skip locked))
            returning u.*
        ), added as (
            insert into inference_usage as u
                (api_key, model, day, requests, prompt_tokens, completion_tokens, last_at)
            select o.api_key, o.model, '-infinity', sum(o.requests), sum(o.prompt_tokens), sum(o.completion_tokens),
                   max(o.last_at)
            from old o group by o.api_key, o.model order by o.api_key, o.model
            on conflict (api_key, model, day) do update set requests = u.requests + excluded.requests,
                prompt_tokens = u.prompt_tokens + excluded.prompt_tokens,
                completion_tokens = u.completion_tokens + excluded.completion_tokens,
                last_at = greatest(u.last_at, excluded.last_at)
        )
        select count(*) into removed from old;
    end if;
    return removed;
end $$;
