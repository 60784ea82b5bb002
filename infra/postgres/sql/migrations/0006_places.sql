-- Where the blobs of this installation have lain, as uris: references name the place they were written
-- under, and blobs may be moved as a whole or restored somewhere else.
create table blob_places (
    root  text primary key,
    since timestamptz not null default clock_timestamp()
);
insert into blob_places (root, since) select rtrim(blobs, '/'), since from installation;
select grant_processes();
