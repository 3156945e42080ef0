"""Parts that every command needs: errors in one sentence, flags, the database, child processes."""
