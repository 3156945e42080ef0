"""Whatever arrives, the controller answers with a status, learns nothing from nonsense, and goes on serving."""

import random

from grpc import aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speclen.controller.config import ControllerConfig
from speclen.controller.service.assembly import create_service
from speclen.controller.service.servicer import registration as read_registration
from speclen.controller.wire.validation import InvalidMessageError, read_profile
from speclen.store.records import StoredState
from speclen.v1 import control_pb2 as pb
from tests.support.control_fakes import controller_story, group, identity, registration, report
from tests.support.damage import damaged

SERVICE = "/speclen.v1.ControlService/"
# gRPC itself answers UNKNOWN to a unary message that it cannot parse, INTERNAL to one that it cannot even frame.
EXPECTED = {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "ABORTED", "UNKNOWN", "INTERNAL"}
UNARY = {
    "RegisterWorker": registration(),
    "ReportStep": pb.ReportStepRequest(worker=identity(), report=report(1)),
    "GetLearnedTable": pb.GetLearnedTableRequest(),
    "ImportProfile": pb.ImportProfileRequest(),
}

floats = st.floats(width=64)
uint32, uint64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
texts = st.text(max_size=10)
identities = st.builds(pb.WorkerIdentity, worker_id=texts, epoch=uint64)
contexts = st.builds(pb.ContextKey, target=texts, draft=texts, device=texts, dtype=texts, engine_fingerprint=texts)
step_reports = st.builds(
    pb.StepReport,
    seq=uint64,
    batch_size=uint32,
    speculation_length=uint32,
    latency_s=floats,
    accepted_histogram=st.lists(uint32, max_size=70),
    mean_context_length=floats,
    decision_version=uint64,
    flags=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5),
    probe_id=uint64,
    ngram=st.booleans(),
    num_verified_tokens=st.none() | uint32,
    draft_prefill_s=floats,
)
profiles = st.builds(
    pb.ImportProfileRequest,
    context=contexts,
    cells=st.lists(
        st.builds(
            pb.ProfileCell,
            batch_size=uint32,
            speculation_length=uint32,
            step_s=floats,
            step_s_stderr=floats,
            num_steps=uint32,
            mean_context_length=floats,
        ),
        max_size=4,
    ),
    survival=st.lists(floats, max_size=4),
    num_survival_rows=st.lists(uint64, max_size=4),
)


@controller_story(commit_interval_s=0.01)
async def test_damaged_bytes_end_in_a_status_and_the_next_worker_is_served(at):
    await at.stub.RegisterWorker(registration())
    dice = random.Random(5)
    seen = set()
    for method, message in UNARY.items():
        call = at.channel.unary_unary(SERVICE + method)
        for _ in range(60):
            seen.add(await code_of(call(damaged(message.SerializeToString(), dice), timeout=5)))
    open_stream = at.channel.stream_stream(SERVICE + "StreamReports")
    for _ in range(60):
        seen.add(await stream_code(open_stream, damaged(group(1, 4).SerializeToString(), dice)))
    assert seen <= EXPECTED, seen
    assert len(seen) >= 3, "damage of many kinds should meet several answers"
    await at.stub.RegisterWorker(registration("after", epoch=2**60))
    call = at.stub.StreamReports()
    request = group(1, 3)
    request.worker.CopyFrom(identity("after", 2**60))
    await call.write(request)
    assert (await call.read()).applied_seq == 3


async def code_of(call) -> str:
    try:
        await call
    except aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def stream_code(open_stream, message: bytes) -> str:
    call = open_stream(timeout=5)
    try:
        await call.write(message)
        await call.done_writing()
        while await call.read() is not aio.EOF:
            pass
    except aio.AioRpcError as error:
        return error.code().name
    return "OK"


@given(identities, contexts, uint32, uint32, texts)
def test_any_registration_is_taken_or_refused(worker, context, batch, length, policy):
    request = pb.RegisterWorkerRequest(
        worker=worker,
        context=context,
        limits=pb.WorkerLimits(max_batch_size=batch, max_speculation_length=length),
        policy=policy,
    )
    try:
        taken = read_registration(request)
    except InvalidMessageError:
        return
    assert 1 <= taken.limits.max_batch_size <= 4096
    assert taken.limits.max_speculation_length <= 64


@given(profiles)
def test_any_profile_is_taken_or_refused(profile):
    try:
        taken = read_profile(profile)
    except InvalidMessageError:
        return
    assert all(0 < cell.step_s <= 3600 for cell in taken.cells)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(step_reports, max_size=20))
def test_nonsense_teaches_nothing_and_never_raises(reports):
    intake, learner = create_service(ControllerConfig(in_memory=True), None, StoredState())
    worker = intake.register(read_registration(registration()))
    before = learner.table(worker)
    refusals = intake.take(worker, reports)
    learner.learn(worker)
    accepted = learner.totals.num_reports
    assert accepted + len(refusals) + learner.totals.num_repeated == len(reports)
    if not accepted:
        assert learner.table(worker) == before
    for key in learner.registry.contexts:
        for row in learner.learned(key)[1]:
            assert row.step_s > 0
            assert row.ms_per_token_low <= row.ms_per_token_high
