-- Whose upload was rejected, when, and its issues as JSON.
alter table dataset_uploads add column uploader text;
alter table dataset_uploads add column rejected_at timestamptz;
alter table dataset_uploads add column issues text;
