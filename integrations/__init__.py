"""speclen inside other engines. No other folder imports it."""
