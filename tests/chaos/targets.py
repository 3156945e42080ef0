"""Targets of fuzzed messages: controller and worker as their servicers use them, without a socket."""

from __future__ import annotations

import random
from pathlib import Path
from tempfile import mkdtemp

from google.protobuf.message import Message

from speclen.controller.config import ControllerConfig
from speclen.controller.service.assembly import create_service
from speclen.controller.service.servicer import STATUS
from speclen.controller.service.servicer import registration as read_registration
from speclen.controller.wire.validation import read_profile
from speclen.store.database import Store
from speclen.v1 import control_pb2 as control
from speclen.v1 import generation_pb2 as generation
from speclen.worker.requests.validation import check_request
from speclen.worker.service.messages import to_request, to_request_id
from tests.support.control_fakes import group, registration, report

VOCABULARY, CONTEXT_LENGTH, MAX_LENGTH = 2048, 1024, 8
PROFILE = control.ImportProfileRequest(
    context=control.ContextKey(target="t", draft="d", device="cpu", dtype="float32"),
    cells=[
        control.ProfileCell(batch_size=batch, speculation_length=length, step_s=0.01 + 0.001 * length, num_steps=9)
        for batch in (1, 8)
        for length in (0, 2)
    ],
    survival=[0.8, 0.5],
    num_survival_rows=[100, 100],
)
GENERATE = generation.GenerateRequest(
    request_id="r",
    text="def f(x):",
    sampling_params=generation.SamplingParams(
        temperature=0.7, top_p=0.9, top_k=40, max_tokens=16, stop=["\n\n"], stop_token_ids=[3], logit_bias={5: 1.0}, n=2
    ),
    stream=True,
)
TOKENIZED = generation.GenerateRequest(tokenized=generation.TokenizedInput(input_ids=[1, 2, 3]))
SEEDS: tuple[Message, ...] = (group(1, 3), registration(), PROFILE, GENERATE, TOKENIZED)


class Targets:
    """A controller's service and a worker's checks. Anything but a refusal in words comes out as an error."""

    def __init__(self) -> None:
        store = Store.open(Path(mkdtemp(prefix="speclen-fuzz-")) / "speclen.db")
        self.intake, self.learner = create_service(ControllerConfig(), store, store.load())
        self.num_taken = self.num_refused = self._seq = self._num_reports = 0
        self._register()

    def _register(self) -> None:
        self.worker = self.intake.register(read_registration(registration()))

    def give(self, message: Message, dice: random.Random) -> None:
        """Raises whatever is no refusal."""
        try:
            if isinstance(message, control.StreamReportsRequest):
                self._report(message)
            elif isinstance(message, control.RegisterWorkerRequest):
                taken = read_registration(message)
                if dice.random() < 0.01:
                    self.intake.register(taken)
            elif isinstance(message, control.ImportProfileRequest):
                read_profile(message)
            else:
                self._generate(message)
        except (ValueError, *STATUS):
            self.num_refused += 1
        else:
            self.num_taken += 1

    def _report(self, message: control.StreamReportsRequest) -> None:
        refused = self.intake.take(self.worker, message.reports)
        self._num_reports += len(message.reports)
        if self._num_reports > 2000:
            self._num_reports = 0
            self.learner.learn(self.worker)
            self._register()
        if refused:
            raise refused[0]

    def _generate(self, message: Message) -> None:
        assert isinstance(message, generation.GenerateRequest)
        request_id = to_request_id(message)
        ids = message.tokenized.input_ids if message.WhichOneof("input") == "tokenized" else [1, 2, 3]
        check_request(to_request(message, request_id, ids), VOCABULARY, CONTEXT_LENGTH, MAX_LENGTH)

    def check(self) -> None:
        """After all that, an honest worker is still learned from, and every number can be worked with."""
        worker = self.intake.register(read_registration(registration("honest", epoch=2**61)))
        assert not self.intake.take(worker, [report(seq) for seq in range(1, 50)]), "honest reports are refused"
        self.learner.learn(worker)
        for key in self.learner.registry.contexts:
            for row in self.learner.learned(key)[1]:
                assert row.step_s > 0
                assert row.ms_per_token_low <= row.ms_per_token_high < float("inf")
