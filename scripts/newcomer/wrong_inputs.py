"""Mistakes of users. Each is answered with one sentence and a code, within two seconds, and never a traceback."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wrong:
    """A line, words of the answer, and variables that are set for it. within_s: 2, or more where torch must look."""

    line: str
    words: str
    variables: dict[str, str] = field(default_factory=dict)
    code: int = 2
    within_s: float = 2.0


# {controller}, {worker}: foreign systems on the default ports. {guarded}, {guarded_worker}: ours, with TLS and a token.
WRONG = [
    # Misspelt words and values.
    Wrong("speclen genrate x", "did you mean 'generate'?"),
    Wrong("speclen generate x --max-token 5", "--max-tokens"),
    Wrong("speclen generate x --top-k -1", "--top-k"),
    Wrong("speclen generate x --seed -1", "--seed"),
    Wrong("speclen generate x --seed 99999999999999999999999", "--seed"),
    Wrong("speclen generate x --temperature -1", "--temperature"),
    Wrong("speclen generate x --temperature nan", "--temperature"),
    Wrong("speclen generate x --top-p 2", "--top-p"),
    Wrong("speclen generate x --n 0", "--n"),
    Wrong("speclen generate x --max-tokens 4294967296", "--max-tokens"),
    Wrong("speclen generate x --timeout-s 0", "--timeout-s"),
    Wrong("speclen generate x --speculation many", "'many' is unknown"),
    Wrong("speclen generate x --speculation 99999999999999999999", "from 0 to 64"),
    Wrong("speclen generate $'\\xff'", "not UTF-8"),
    Wrong("printf '\\xff' | speclen generate -", "not UTF-8"),
    Wrong("speclen generate x --worker nowhere", "is not HOST:PORT"),
    Wrong("speclen worker --policy greedy", "'greedy' is unknown"),
    Wrong("speclen worker --policy fixed:9", "over --max-length 8"),
    Wrong("speclen worker --policy profile", "needs --profile"),
    Wrong("speclen worker --max-kv-tokens 10", "at least 256"),
    Wrong("speclen worker --max-batch-size 0", "at least 1"),
    Wrong("speclen worker --listen nowhere --controller ''", "is not HOST:PORT"),
    Wrong("speclen worker --listen 0.0.0.0:0 --controller ''", "is open to other machines"),
    Wrong("speclen worker --listen 127.0.0.1:0 --controller '' --metrics-listen 0.0.0.0:0", "--tls-client-ca"),
    Wrong("speclen up --policy greedy", "'greedy' is unknown"),
    Wrong("speclen up --workers 0", "--workers"),
    Wrong("speclen up --listen 7080", "is not HOST:PORT"),
    Wrong("speclen controller --policy greedy --listen 127.0.0.1:0", "greedy"),
    Wrong("speclen controller --listen 0.0.0.0:0", "is open to other machines"),
    Wrong("speclen controller --db /proc/x.db --listen 127.0.0.1:0", "/proc/x.db"),
    Wrong("speclen controller --db foreign.db --listen 127.0.0.1:0", "not one of speclen's"),
    Wrong("speclen tables --db absent.db", "There is no database at absent.db"),
    Wrong("speclen tables --db foreign.db", "not one of speclen's"),
    Wrong("speclen tables --db junk.pem", "junk.pem"),
    Wrong("speclen doctor --db absent.db", "there is no database at absent.db"),
    Wrong("speclen backup copy.db --db absent.db", "absent.db"),
    Wrong("speclen explain --batch 1 --db absent.db", "absent.db"),
    Wrong("speclen dashboard --db absent.db", "absent.db"),
    Wrong("speclen profile import junk.pem", "junk.pem"),
    Wrong("speclen --config absent.toml tables", "absent.toml"),
    Wrong("speclen --config broken.toml tables", "not valid TOML"),
    Wrong("speclen --config typo.toml tables", "did you mean 'worker'?"),
    # The environment.
    Wrong("speclen tables", "did you mean", {"SPECLEN_WORKER_MAX_BATCHSIZE": "3"}),
    Wrong("speclen tables", "did you mean SPECLEN_TABLES_DB?", {"SPECLEN_TABELS_DB": "x"}),
    Wrong("speclen tables --db absent.db", "There is no database", {"SPECLEN_PORT_7070_TCP_ADDR": "10.0.0.1"}),
    # Foreign systems on the default ports: another checkout's controller, and a web server.
    Wrong("speclen up", "a speclen controller of {foreign}"),
    Wrong("speclen up --controller 127.0.0.1:0", "is taken by another program"),
    Wrong("speclen controller --data-dir mine", "Address already in use"),
    Wrong("speclen worker --controller ''", "Address already in use"),
    Wrong("speclen worker --run-id mine --listen 127.0.0.1:0", "a speclen controller of {foreign}"),
    Wrong("speclen generate x", "no worker answers at 127.0.0.1:7080, though something listens"),
    Wrong("speclen generate x --worker {controller}", "is no speclen worker"),
    Wrong("speclen profile import profile.json --as-prior --db mine/speclen.db --controller {controller}", "{foreign}"),
    # TLS and a token.
    Wrong("speclen generate x --worker {guarded_worker}", "give --ca"),
    Wrong("speclen generate x --worker {guarded_worker} --ca ca.pem", "wants a token"),
    Wrong("speclen generate x --worker {guarded_worker} --ca ca.pem --token-file wrong", "does not accept the token"),
    Wrong("speclen generate x --worker {guarded_worker} --ca other.pem --token-file token", "vouches for"),
    Wrong("speclen generate x --worker {guarded_worker} --ca junk.pem --token-file token", "holds no certificates"),
    Wrong("speclen generate x --worker {guarded_worker} --ca absent.pem", "No such file"),
    Wrong("speclen generate x --worker {guarded_worker} --ca ca.pem --cert server.pem", "belong together"),
    Wrong("speclen generate x --ca ca.pem --token-file short", "at least 16"),
    Wrong(
        "speclen profile import profile.json --as-prior --controller {guarded} --ca ca.pem --token-file wrong",
        "does not accept the token",
    ),
    Wrong("speclen worker --listen 127.0.0.1:0 --controller {guarded}", "give --controller-ca"),
    Wrong(
        "speclen worker --listen 127.0.0.1:0 --controller {guarded} --controller-ca ca.pem --controller-token-file wrong",
        "does not accept the token",
    ),
    Wrong(
        "speclen worker --listen 127.0.0.1:0 --controller {guarded} --controller-ca junk.pem", "holds no certificates"
    ),
    Wrong("speclen controller --listen 127.0.0.1:0 --tls-cert junk.pem --tls-key server.key", "cannot be used"),
    Wrong("speclen controller --listen 127.0.0.1:0 --tls-cert server.pem --tls-key ca.key", "belong together"),
    Wrong("speclen worker --listen 127.0.0.1:0 --controller '' --tls-cert server.key --tls-key server.pem", "swapped"),
    Wrong("speclen controller --listen 127.0.0.1:0 --tls-cert server.pem", "belong together"),
    Wrong("speclen controller --listen 127.0.0.1:0 --token-file short", "at least 16"),
]
