-- What judges said about samples, before the grades of their group are in the log, so that nothing is asked and paid
-- for twice. And what the judges of a run or evaluation have used. The rows of a run go when its history goes.
create table judgements (
    owner     text not null,
    key       text not null,
    judgement text not null,
    primary key (owner, key)
);

create table judge_usage (
    owner  text primary key,
    calls  bigint not null default 0,
    tokens bigint not null default 0,
    usd    double precision not null default 0
);

create function forget_judgements() returns trigger language plpgsql as $$
begin
    delete from judgements j where j.owner = new.owner;
    delete from judge_usage u where u.owner = new.owner;
    return null;
end $$;
create trigger forget_judgements after insert or update on removals
    for each row execute function forget_judgements();

-- The artifact with the judgements of a group, if its run has rubrics.
alter table graded_groups add column judgements text;
