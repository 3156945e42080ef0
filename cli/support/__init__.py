"""What verbs share: output and errors, flags, clients, the database, child processes."""
