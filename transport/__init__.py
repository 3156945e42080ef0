"""Parts that controller and worker share: addresses, TLS, tokens, logs, supervision. Imports no other folder."""
