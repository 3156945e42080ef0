"""Both servers log alike: JSON unless on a terminal, one line per event, also for events of libraries."""

import io
import json
import logging

import pytest
import structlog
from google.protobuf.message import DecodeError

from speclen.process.logs import set_up_logs


@pytest.fixture(autouse=True)
def as_before():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def test_events_and_records_of_python_are_lines_of_one_form():
    stream = io.StringIO()
    set_up_logs("info", stream)
    structlog.get_logger().debug("details")
    structlog.get_logger().info("lengths changed", version=3)
    logging.getLogger("speclen.worker.engine.engine").info("of ours")
    logging.getLogger("grpc").info("of others")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("speclen.worker.engine.engine").exception("a step of %d rows failed", 3)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["lengths changed", "of ours", "a step of 3 rows failed"]
    assert [line["level"] for line in lines] == ["info", "info", "error"]
    assert all(line["timestamp"].endswith("Z") for line in lines)
    assert lines[0]["version"] == 3
    assert "ValueError: two\nlines" in lines[2]["exception"]


def test_logs_of_libraries_cannot_fill_the_disk():
    stream = io.StringIO()
    set_up_logs(stream=stream)
    for _ in range(1000):
        try:
            raise DecodeError("Error parsing message")
        except DecodeError:
            logging.getLogger("grpc").exception("Unexpected [DecodeError] raised by servicer method [/a/B]")
    logging.getLogger("uvicorn").warning("Invalid HTTP request received.")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert "Traceback" not in stream.getvalue()
