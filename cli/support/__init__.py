"""Parts that verbs share: errors in one sentence, flags, clients, the database, child processes."""
