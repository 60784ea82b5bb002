-- Entries of the audit list are chained by hash: those of changes, and the others. Each holds the SHA-256 of the entry of
-- its chain before it, and that over this hash and its own content. Entries from before have none. `audit_heads` has the
-- last hash of each chain, and its lock gives the entries their order.

alter table audit add column previous_sha256 bytea, add column sha256 bytea;

create table audit_heads (
    chain  text primary key,
    sha256 bytea not null
);
insert into audit_heads (chain, sha256)
values ('changes', decode(repeat('00', 32), 'hex')), ('others', decode(repeat('00', 32), 'hex'));

select grant_processes();
