"""Settings of a worker, with defaults that work."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from speclen.process.credentials import ClientSecurity, ServerSecurity, read_file
from speclen.process.embedded import EMBEDDED
from speclen.process.settings import check_bounds, check_free, flag, setting
from speclen.records import PLAIN, Arm, parse_arm
from speclen.worker.models.naming import AUTO, check_settings, draft_of

LEAST_KV_TOKENS = 256  # one short prompt with an answer; below it nearly all requests would be refused
FIXED = re.compile(r"fixed:(\d{1,2})")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
KEY_FLAG = "--api-key-file"


@dataclass(frozen=True, slots=True)
class WorkerConfig(ServerSecurity):
    """Settings of `speclen worker`. Raises ValueError with one sentence that names the flag."""

    listen: str = setting("127.0.0.1:7080", "Address of the Generate service, HOST:PORT.")
    controller: str = setting(
        EMBEDDED,
        "Address of the controller; of several, separated by commas, one is chosen; embedded: the one of this machine's "
        "data directory, which is started if there is none; off: none.",
    )
    target: str = setting("bundled:target", "Target model: directory, hub id or bundled name.")
    draft: str = setting(
        AUTO,
        "Draft model; auto: the bundled one with a bundled target; none: only n-grams are proposed.",
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N.")
    dtype: str = setting("auto", "auto, float32, bfloat16 or float16.")
    backend: str = setting(
        "auto", "auto: OpenVINO on x86 CPUs where it is installed and runs the models exactly; torch; openvino."
    )
    max_batch_size: int = setting(32, "Sequences decoding in one step.", least=1, most=4096)
    max_length: int = setting(8, "Largest speculation length.", least=0, most=64)
    ngram: bool = setting(True, "Let the adaptive policy select n-grams (prompt lookup) in addition to draft tokens.")
    max_waiting: int = setting(256, "Requests that may wait; one more is refused at once.", least=0)
    max_queue_s: float = setting(
        0.0, "Refuse a request at once that would wait for a slot longer than this many seconds; 0: never.", least=0
    )
    max_kv_tokens: int = setting(0, "Tokens of KV cache over all sequences; 0: as many as fit.", least=0)
    max_cached_tokens: int = setting(
        8192, "Tokens of prompts and outputs remembered for requests that begin alike, on OpenVINO; 0: none.", least=0
    )
    policy: str = setting(
        "adaptive",
        "adaptive; shadow: serve with the baseline and learn; profile; or one arm for all steps: none, fixed:K, "
        "n-gram, 'n-gram else draft 3'.",
    )
    baseline: str = setting(
        "none",
        "Arms to compare learned ones with, and to use where these are slower: none (plain decoding), fixed:K, n-gram, or "
        "profile; off: no comparison.",
    )
    profile: Path | None = setting(None, "Profile as JSON, to start from or for --policy profile.")
    generation_config: str = setting(
        "auto",
        "auto: requests that leave temperature, top_p, top_k, min_p or repetition_penalty out get the target's own, of its "
        "generation_config.json; none: they get the defaults of the protocol.",
    )
    worker_id: str = setting("", "Stable name in the fleet; default: host name and port.")
    threads: int = setting(
        0, "CPU threads for the models; 0: by model size, fewer while other processes want the cores.", least=0
    )
    http_listen: str = setting("", "Address of the OpenAI-compatible HTTP front, HOST:PORT; empty for none.")
    api_key_file: Path | None = setting(
        None, "File with the keys of HTTP callers, one per line, sent as bearer token; default: --token-file."
    )
    http_allow_origin: str = setting(
        "",
        "Web origins whose pages may call the HTTP front, SCHEME://HOST:PORT separated by commas, or *; empty: none.",
    )
    served_model_name: str = setting("", "Name of the model over HTTP; default: the target's.")
    chat_template: Path | None = setting(None, "Chat template, Jinja; default: the tokenizer's own.")
    metrics_listen: str = setting("", "Address of the Prometheus page; empty for none.")
    probe_listen: str = setting(
        "", "Address where health alone answers, without TLS or token: for probes; empty for none."
    )
    unread_timeout_s: float = setting(
        30.0, "Seconds without reading after which a client loses its request.", least=0.1
    )
    drain_timeout_s: float = setting(30.0, "Seconds that running requests have after SIGTERM.", least=0)
    log_level: str = setting("info", "Least level that is logged: debug, info, warning or error.")
    controller_ca: Path | None = setting(None, "Authority of the controller's certificate, PEM.")
    controller_cert: Path | None = setting(None, "Certificate to show to the controller, PEM.")
    controller_key: Path | None = setting(None, "Key of that certificate, PEM.")
    controller_token_file: Path | None = setting(None, "File with the controller's bearer token.")
    run_id: str = setting("", "Name of the run that this belongs to; a controller of another run is not used.")

    def __post_init__(self) -> None:
        ServerSecurity.__post_init__(self)
        check_bounds(self)
        check_settings(self.device, self.dtype, self.backend)
        object.__setattr__(self, "draft", draft_of(self.target, self.draft))
        if self.generation_config not in ("auto", "none"):
            raise ValueError(f"--generation-config {self.generation_config!r} is unknown: use auto or none")
        length = (parse_policy(self.policy) or PLAIN).speculation_length
        if length > self.max_length:
            raise ValueError(f"--policy {self.policy} is over --max-length {self.max_length}: raise that, or use less")
        if length and not self.has_draft:
            raise ValueError(f"--policy {self.policy} needs a draft model: give a --draft, or use --policy n-gram")
        for name in ("policy", "baseline"):
            if getattr(self, name) == "profile" and self.profile is None:
                raise ValueError(f"--{name} profile needs --profile FILE: make one with `speclen profile run`")
        self._check_baseline()
        if 0 < self.max_kv_tokens < LEAST_KV_TOKENS:
            raise ValueError(
                f"--max-kv-tokens is {self.max_kv_tokens}; it must be 0, for as many as fit, or at least {LEAST_KV_TOKENS}"
            )

    def _check_baseline(self) -> None:
        """Raises ValueError for a baseline that cannot run."""
        if self.baseline in ("off", "profile"):
            if self.policy == "shadow" and self.baseline == "off":
                raise ValueError("--policy shadow serves with the baseline, which is off: name one with --baseline")
            return
        arm = parse_policy(self.baseline, "--baseline")
        if arm is None:
            raise ValueError(f"--baseline {self.baseline} learns: use none, fixed:K, n-gram, profile or off")
        if arm.speculation_length > self.max_length:
            raise ValueError(
                f"--baseline {self.baseline} is over --max-length {self.max_length}: raise that, or use less"
            )
        if arm.speculation_length and not self.has_draft:
            raise ValueError(
                f"--baseline {self.baseline} needs a draft model: give a --draft, or use --baseline n-gram"
            )

    @property
    def follows_table(self) -> bool:
        """True if the controller's table is used."""
        return self.policy in ("adaptive", "shadow")

    @property
    def has_draft(self) -> bool:
        return self.draft not in ("", "none")

    @property
    def may_use_ngrams(self) -> bool:
        """True if any arm that the worker may run has n-grams."""
        arm = parse_policy(self.policy)
        return arm.ngram if arm is not None else self.ngram and self.follows_table

    def http_security(self) -> ServerSecurity:
        """Security of the HTTP front, with a key file of its own if given."""
        keys = self.api_key_file or self.token_file
        return ServerSecurity(self.tls_cert, self.tls_key, self.tls_client_ca, keys, insecure=self.insecure)

    def check_listening(self) -> None:
        """Raises ValueError for an address that needs protection, OSError for one that is taken."""
        self.check_exposure("--listen", self.listen)
        if self.metrics_listen:
            self.check_exposure("--metrics-listen", self.metrics_listen, tokens=False)
        self.check_http()
        for name in ("listen", "metrics_listen", "http_listen", "probe_listen"):
            if address := getattr(self, name):
                check_free(flag(name), address)

    def check_http(self) -> None:
        """Raises ValueError for settings of the HTTP front that cannot work."""
        if self.http_listen:
            security = self.http_security()
            security.check_exposure("--http-listen", self.http_listen)
            security.credentials()
            security.keyring(KEY_FLAG)
            self.read_template()
            self.http_origins()

    def http_origins(self) -> list[str]:
        """Origins whose pages may call the HTTP front. Raises ValueError for one that no browser sends."""
        origins = [one.strip() for one in self.http_allow_origin.split(",") if one.strip()]
        for one in origins:
            if one != "*" and not ORIGIN.fullmatch(one):
                raise ValueError(
                    f"--http-allow-origin {one!r} is not an origin: write SCHEME://HOST:PORT, no path, or *"
                )
        return origins

    def read_template(self) -> str | None:
        """The chat template that replaces the tokenizer's. Raises ValueError if it cannot be read."""
        path = self.chat_template
        return None if path is None else read_file("--chat-template", path).decode("utf-8", errors="replace")

    def controller_security(self) -> ClientSecurity:
        """Certificates and token for the controller."""
        return ClientSecurity(
            self.controller_ca, self.controller_cert, self.controller_key, self.controller_token_file, "--controller-"
        )


def parse_policy(policy: str, name: str = "--policy") -> Arm | None:
    """The arm of a policy that names one; None for others. name: of the flag. Raises ValueError naming flag and value."""
    if policy in ("adaptive", "shadow", "profile"):
        return None
    if policy == "none":
        return PLAIN
    fixed = FIXED.fullmatch(policy)
    try:
        return Arm(int(fixed[1])) if fixed else parse_arm(policy)
    except ValueError:
        raise ValueError(
            f"{name} {policy!r} is unknown: use adaptive, shadow, profile, none, fixed:K with K a number, or an arm, such "
            "as n-gram or 'n-gram else draft 3'"
        ) from None
