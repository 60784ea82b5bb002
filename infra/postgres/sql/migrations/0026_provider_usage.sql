-- What an evaluation has used of a provider's model, so that its workers share one bound. The row goes when
-- the history of its owner goes.
create table provider_usage (
    owner text primary key,
    calls bigint not null default 0,
    usd   double precision not null default 0
);

create or replace function forget_judgements() returns trigger language plpgsql as $$
begin
    delete from judgements j where j.owner = new.owner;
    delete from judge_usage u where u.owner = new.owner;
    delete from provider_usage u where u.owner = new.owner;
    return null;
end $$;
