"""A setting that cannot work is refused before anything starts, by the name of its flag."""

from pathlib import Path

import pytest

from speclen.controller.config import ControllerConfig


def test_the_defaults_are_the_documented_ones():
    config = ControllerConfig()
    assert config.listen == "127.0.0.1:7070"
    assert config.database == Path(".speclen/speclen.db")
    assert ControllerConfig(data_dir=Path("/x")).database == Path("/x/speclen.db")
    assert ControllerConfig(data_dir=Path("/x"), db=Path("y.db")).database == Path("y.db")


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"listen": "7070"}, "--listen"),
        ({"listen": "0.0.0.0:7070"}, "--listen"),
        ({"tls_cert": Path("c")}, "--tls-key"),
        ({"tls_client_ca": Path("c")}, "--tls-cert"),
        ({"metrics_listen": "0.0.0.0:9090"}, "--metrics-listen"),
        ({"commit_interval_s": 0.0}, "--commit-interval-s"),
        ({"commit_interval_s": float("nan")}, "--commit-interval-s"),
        ({"keep_reports": 0}, "--keep-reports"),
        ({"keep_days": -1.0}, "--keep-days"),
        ({"max_streams": 0}, "--max-streams"),
        ({"max_workers": 0}, "--max-workers"),
        ({"max_contexts": 0}, "--max-contexts"),
        ({"silence_s": 0.0}, "--silence-s"),
        ({"drain_timeout_s": -1.0}, "--drain-timeout-s"),
    ],
)
def test_what_cannot_work_is_named(options, flag):
    with pytest.raises(ValueError, match=flag):
        ControllerConfig(**options)
