"""`speclen worker`, sabotaged: python failing_worker.py PART ARGUMENTS...

PART "engine": the engine's loop fails as soon as two requests wait. "reporting": the reporting task fails again and again.
"hang": the engine's loop never does anything and never ends. "few": only three reports are kept, nothing else is wrong.
"""

import sys
import time

from speclen.cli.app import main
from speclen.worker.engine.engine import Engine
from speclen.worker.frontend import worker_server
from speclen.worker.reporting.control_client import ControlClient, ReportBuffer

TRIM = ReportBuffer.trim


def fail_with_two_requests(engine: Engine) -> None:
    while engine.load().num_waiting < 2:
        time.sleep(0.01)
    raise MemoryError("no room\nfor a second line")


def hang(engine: Engine) -> None:
    time.sleep(3600)


def trim_to_few(buffer: ReportBuffer) -> None:
    buffer.max_buffered = 3
    TRIM(buffer)


async def fail(*_: object) -> None:
    raise ZeroDivisionError("sabotage")


if __name__ == "__main__":
    part = sys.argv.pop(1)
    if part == "engine":
        Engine.run = fail_with_two_requests
    elif part == "hang":
        Engine.run = hang
        worker_server.STOP_TIMEOUT_S = 0.5
    elif part == "few":
        ReportBuffer.trim = trim_to_few
    else:
        ControlClient.run = fail
    main()
