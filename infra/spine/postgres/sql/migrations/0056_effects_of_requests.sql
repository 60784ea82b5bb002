-- What waits to be fetched names the request of the commit, and no push. An effect is no fact, so it is renamed.

update effects set data = (data::jsonb - 'push' || jsonb_build_object('request', data -> 'push'))::json
where type in ('FetchCommit', 'DiscoverRollouts') and data ->> 'request' is null;
