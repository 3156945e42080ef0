"""The plugin's tracker of steps, fed as vLLM's loop feeds it: steps are launched, and their results taken in order."""

from speclen.integrations.vllm.steps import StepTracker, Traits
from speclen.worker.arms import ArmChoice
from tests.support import fake_vllm


class Steps:
    """requests: by name. now_s: the host's clock, which callers advance."""

    def __init__(self, names, num_tokens, choice, traits=None, clock=None):
        """Sequences of these names that hold num_tokens each. choice: the one before the first step."""
        self.tracker = StepTracker(traits or Traits(), choice, clock)
        self.requests = {name: fake_vllm.Request(name, num_tokens, num_computed_tokens=num_tokens) for name in names}
        self.now_s = 0.0

    def launch(self, output, choice: ArmChoice):
        """Schedule a step, which drafts for the next one by this choice."""
        pending = self.tracker.scheduled(output, self.requests, self.now_s)
        if pending is not None:
            self.tracker.drafts(pending, choice)
        return output

    def take(self, output, accepted):
        """The record of a step whose result is there. accepted: tokens by name; none for those that are not named."""
        self.tracker.arrived(output, self.requests, self.now_s)
        runs = {name: accepted.get(name, 0) for name in output.num_scheduled_tokens}
        return self.tracker.finished(fake_vllm.sampled(runs), True)
