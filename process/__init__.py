"""Parts of a server process that controller and worker share: addresses, TLS, tokens, settings, logs, supervision.

It imports no other folder.
"""
