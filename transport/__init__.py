"""What controller and worker have in common: addresses, TLS, tokens, logs, supervision. Imports nothing of ours."""
