"""The APIs of forges: webhooks, commit statuses, and the tokens of GitHub Apps."""
