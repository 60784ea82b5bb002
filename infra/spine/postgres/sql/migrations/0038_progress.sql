-- Effects that show no progress are an alarm.

alter table effects add column progressed_at timestamptz;
alter table effects alter column progressed_at set default clock_timestamp();

-- When an effect was claimed, or saved its memo: since then it has shown no progress. What is born claimed has
-- the default.
create function note_progress() returns trigger language plpgsql as $$
begin
    new.progressed_at := clock_timestamp();
    return new;
end $$;
create trigger effects_progress before update of epoch, memo on effects for each row
    when (new.epoch <> old.epoch or new.memo is distinct from old.memo) execute function note_progress();
