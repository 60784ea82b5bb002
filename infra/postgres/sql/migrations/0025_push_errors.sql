-- What is wrong with a push is asked of its own rows. A column of the workspace showed the error that was
-- recorded last, which may be of an older push than the newest one.

alter table workspaces drop column push_error;
