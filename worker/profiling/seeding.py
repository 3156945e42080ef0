"""Before a worker serves: if the controller knows nothing of its context, measure a quick profile and hand it over."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import structlog

from speclen.transport.address import past_proxies
from speclen.v1 import control_pb2_grpc as rpc
from speclen.worker.config import WorkerConfig
from speclen.worker.models.loading import ModelPair
from speclen.worker.profiling.profiler import quick_profile
from speclen.worker.profiling.request import knows_context, profile_request
from speclen.worker.reporting.card import WorkerCard

log = structlog.get_logger()

IMPORT_TIMEOUT_S = 10.0


def seed_controller(config: WorkerConfig, pair: ModelPair, card: WorkerCard, progress: Callable[[str], None]) -> None:
    """Measure for at most `quick_profile_s`, if that is asked for and needed. Never fails: a worker can always learn.

    Raises ValueError when certificates or token of the controller cannot be read.
    """
    security = config.controller_security()
    credentials, metadata = security.credentials(), security.metadata()
    address, options = config.controller, past_proxies(config.controller)
    channel = (
        grpc.secure_channel(address, credentials, options) if credentials else grpc.insecure_channel(address, options)
    )
    with channel:
        known = knows_context(channel, card.context, metadata)
        if known is None:
            table = "the given profile" if config.profile else "a default length"
            progress(f"no controller answers at {config.controller}: serving with {table} until one does")
        if known is not False:
            return
        if not config.quick_profile_s or pair.draft is None:
            progress(
                "the controller knows nothing of this context and learns while it serves (--quick-profile-s 20 measures)"
            )
            return
        progress(f"the controller knows nothing of this context: measuring a profile for {config.quick_profile_s:g} s")
        try:
            result = quick_profile(
                pair,
                card.limits.max_batch_size,
                card.limits.max_speculation_length,
                config.quick_profile_s,
                config.backend,
            )
            request = profile_request(card.context, result, source="quick profile at the start of a worker")
        except Exception as error:
            log.warning("no profile could be measured; going on without", exc_info=error)
            return
        try:
            rpc.ControlServiceStub(channel).ImportProfile(request, timeout=IMPORT_TIMEOUT_S, metadata=metadata)
            progress(f"profile of {len(result.cells)} cells handed to the controller")
        except grpc.RpcError as error:
            progress(
                f"the controller did not take the profile ({error.code().name}: {error.details()}); going on without"
            )
