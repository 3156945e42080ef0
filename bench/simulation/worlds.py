"""The worlds of the scoreboard, by the names for `--world`. Two are calibrated on recordings; the others vary them."""

from __future__ import annotations

from speclen.bench.simulation.level import AnySize, Day, Noise, Rollout, Sweep
from speclen.bench.simulation.machines import Machine, VllmMachine
from speclen.bench.simulation.texts import Texts
from speclen.bench.simulation.world import Stage, World
from speclen.records import Limits

H200 = Machine()
SLOW_DRAFT = H200.slower(3.0, "pass_s", "drafting_s")
CHEAP_DRAFT = H200.slower(0.4, "pass_s", "drafting_s")
THROTTLED = H200.slower(2.0, "sequence_s", "pass_s", "drafting_s", "token_s")
# Measured on two cores: the first steps after a change of arm took 46, 44, 43, 41 ms, later ones 34 to 37.
CPU = Machine(0.028, 0.0015, 0.004, 0.0, 0.0022)
CPU_TRANSITION = (0.30, 0.24, 0.21, 0.15)
DENSE = Machine(0.012, 0.00002, 0.0012, 0.0002, 0.00001, knee=256, late_token_s=0.00005)
PADDED = DENSE._replace(padding=(1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512), token_s=0.00004)
EXPERTS = Machine(0.006, 0.00005, 0.0012, 0.0002, 0.00003, expert_s=0.00012)
LONG = Machine(0.014, 0.0001, 0.0016, 0.0, 0.00003, context_s=6e-8)

PLAIN_TEXT = Texts(repeating=0.0, wrong_match=0.5, wrong_continues=0.7)
REPEATING = Texts(repeating=1.0, begins=0.3, continues=0.985, wrong_match=0.05)
HARD = Texts(easy_share=0.0)
VLLM_TEXTS = Texts((1.0,), (0.88,), (0.55,), 0.62, 0.03, 1.0, 0.0, wrong_match=0.0, num_tokens=(128, 256),
                   prompt_tokens=(128, 129))  # fmt: skip
EAGLE = VLLM_TEXTS._replace(easy=(0.9,), hard=(0.7,), deeper=0.985)
WIDE = Sweep((1, 4, 16, 48, 96, 160, 256), (1.5, 4.0))

OWN = World("speclen's engine on an H200")
DRAFTS = World("the same without n-grams and evaluation", texts=VLLM_TEXTS, limits=Limits(16, 8), evaluated=None)
VLLM = DRAFTS._replace(
    title="vLLM with a draft model on an H200",
    machines=(VllmMachine(),),
    limits=Limits(32, 8),
    load=Sweep((1, 2, 4, 8, 16, 32), (1.5, 3.5)),
    overlapped=True,
)
LARGE = DRAFTS._replace(machines=(DENSE,), limits=Limits(256, 8), load=WIDE)
ON_CPU = OWN._replace(
    title="a CPU: changing the arm takes four steps",
    machines=(CPU,),
    limits=Limits(8, 4, ngram=True),
    load=Sweep((1, 2, 4, 8), (8.0, 16.0)),
    noise=Noise(slow=1.0),
    seconds=240.0,
    transition=CPU_TRANSITION,
)
NO_DRAFT = OWN._replace(
    machines=(CPU,),
    limits=Limits(16, 0, ngram=True),
    load=Sweep((4, 8, 16), (8.0, 16.0)),
    noise=Noise(slow=1.0),
    seconds=180.0,
)


def and_back(machine: Machine | None = None, texts: Texts | None = None) -> tuple[Stage, ...]:
    """A change that lasts for the middle third of the time."""
    return Stage(1 / 3, machine, texts), Stage(2 / 3)


WORLDS = {
    # From recordings.
    "vllm-h200": VLLM._replace(seconds=120.0),
    "own-h200": OWN._replace(seconds=120.0),
    # Profiles.
    "profile": DRAFTS._replace(title="a true profile, nothing changes", profile=1.0),
    "profile-vllm": VLLM._replace(title="a true profile of vLLM", profile=1.0),
    "profile-never": OWN._replace(title='a profile that says "never draft"', profile=3.0),
    "profile-always": OWN._replace(
        title="a profile in which drafts are too cheap", profile=0.6, machines=(SLOW_DRAFT,)
    ),
    # Machines.
    "padding": LARGE._replace(title="padding to graph sizes", machines=(PADDED,)),
    "experts": LARGE._replace(title="mixture of experts", machines=(EXPERTS,)),
    "cliff": LARGE._replace(
        title="steps beyond 64 tokens take 40% longer",
        machines=(DENSE._replace(cliff=64, cliff_s=0.006),),
        load=Sweep((4, 8, 12, 16, 24, 40), (1.5, 4.0)),
        limits=Limits(48, 8),
    ),
    "eagle": DRAFTS._replace(
        title="drafts to 15 tokens",
        machines=(H200.slower(0.25, "pass_s"),),
        texts=VLLM_TEXTS._replace(easy=(0.9,), hard=(0.7,), deeper=0.985),
        limits=Limits(16, 15),
    ),
    "long-contexts": DRAFTS._replace(
        title="contexts from 1,000 to 60,000 tokens",
        machines=(LONG,),
        texts=VLLM_TEXTS._replace(prompt_tokens=(1000, 60_000)),
    ),
    "slow-steps": DRAFTS._replace(
        title="steps of 250 ms",
        machines=(H200.slower(30.0, "overhead_s", "sequence_s", "pass_s", "drafting_s", "token_s"),),
        load=Sweep((1, 4, 8, 16), (30.0, 60.0)),
        seconds=1200.0,
    ),
    "cpu": ON_CPU,
    "compilation": DRAFTS._replace(title="a batch size and arm not run before is compiled for 3 s", first_use_s=3.0),
    "throttled": OWN._replace(title="device twice as slow, and back", stages=and_back(THROTTLED)),
    "verification-throttled": OWN._replace(
        title="verification alone slower, and back", stages=and_back(H200._replace(token_s=0.0003))
    ),
    "drift": OWN._replace(
        title="a draft model that slowly becomes three times as slow",
        stages=tuple(Stage(at / 12, H200.slower(1.0 + at / 5, "pass_s", "drafting_s")) for at in range(1, 12)),
    ),
    "unlike": OWN._replace(title="two workers, one with a slower draft", machines=(H200, SLOW_DRAFT), seconds=60.0),
    "three-unlike": LARGE._replace(
        title="three workers, one with a draft four times slower; sizes to 256",
        machines=(DENSE, DENSE, DENSE.slower(4.0, "pass_s")),
        load=AnySize(256, 0.1),
    ),
    "faulty": OWN._replace(
        title="one of four workers reports every draft token as accepted",
        machines=(H200,) * 4,
        last_is_faulty=True,
        seconds=40.0,
    ),
    # Loads.
    "rollout": LARGE._replace(title="rollouts from 256 requests to 1", load=Rollout(256, 40.0), seconds=80.0),
    "day-and-night": LARGE._replace(title="load from 1 to 96 and back", load=Day(96, 30.0), limits=Limits(96, 8)),
    "any-size": LARGE._replace(title="sizes to 200 that seldom repeat", load=AnySize(200, 0.25), limits=Limits(200, 8)),
    "one-request": OWN._replace(title="one request at a time", load=Sweep((1,), (3.0, 5.0)), seconds=60.0),
    # Requests.
    "identical": OWN._replace(title="one request, over and over", texts=Texts(number=1)),
    "hard": OWN._replace(title="all requests become hard, and back", stages=and_back(texts=HARD)),
    "tenants": OWN._replace(
        title="easy and hard requests in turn, 1 s each",
        texts=Texts(easy_share=1.0),
        stages=tuple(Stage(at / 90, None, HARD if at % 2 else None) for at in range(1, 90)),
    ),
    # Noise and reports.
    "flagged": OWN._replace(title="60% of the steps are flagged", flagged=0.6),
    "neighbours": OWN._replace(title="noisy neighbours", noise=Noise(1.5, 8.0, 8.0, 8.0, 0.0, 0.15)),
    "bimodal": OWN._replace(title="a third of the steps take 1.7 times as long", noise=Noise(spikes=(0.33, 1.7))),
    "heavy-tails": OWN._replace(title="heavy-tailed times", noise=Noise(tail_share=0.15, tail_sd=0.7)),
    "skewed": OWN._replace(
        title="one in 20 steps that draft takes 4 times as long", noise=Noise(draft_spikes=(0.05, 4.0))
    ),
    "late-and-lost": OWN._replace(
        title="60% of reports lost, others 3 s late; requests become hard, and back",
        lost=0.6,
        late_s=3.0,
        stages=and_back(texts=HARD),
    ),
    # N-grams and drafts that are useful only at times.
    "repeats": OWN._replace(
        title="text repeats, then does not, and back", texts=REPEATING, stages=and_back(texts=PLAIN_TEXT)
    ),
    "repeats-later": OWN._replace(
        title="text begins to repeat, and stops", texts=PLAIN_TEXT, stages=and_back(texts=REPEATING)
    ),
    "n-grams": NO_DRAFT._replace(
        title="no draft: text repeats, then does not, and back", texts=REPEATING, stages=and_back(texts=PLAIN_TEXT)
    ),
    "n-grams-later": NO_DRAFT._replace(
        title="no draft: text begins to repeat, and stops", texts=PLAIN_TEXT, stages=and_back(texts=REPEATING)
    ),
    "dear-draft": OWN._replace(title="the draft becomes three times as dear, and back", stages=and_back(SLOW_DRAFT)),
    "cheap-draft": OWN._replace(
        title="a dear draft becomes cheap, and dear again", machines=(SLOW_DRAFT,), stages=and_back(CHEAP_DRAFT)
    ),
}
