-- What edges appended is found in the log itself by its id (infra/log.py, KNOWN), so that it needs no row
-- in the inbox, where it could never be deleted.
create index events_edge on events (id) where causation = correlation;
delete from inbox where consumer = 'edge';
