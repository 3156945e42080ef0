"""The scoreboard: the oracle scores 100, and differences carry their standard error."""

import pytest

from speclen.bench.simulation.learners import Fixed, Learner
from speclen.bench.simulation.play import play
from speclen.bench.simulation.policy import Run, difference
from speclen.bench.simulation.world import Scene
from speclen.bench.simulation.worlds import WORLDS

WITHOUT_CHANGES = [name for name, world in WORLDS.items() if not world.stages and len(world.machines) == 1]


def follow(scene: Scene) -> Learner:
    """The oracle of a world that does not change."""
    truth, limits = scene.workers[0].truths[0], scene.world.limits
    context = float(truth.outputs.prompts.mean())
    return Fixed({size: truth.best_arm(size, context) for size in range(1, limits.max_batch_size + 1)})


@pytest.mark.parametrize("name", [name for name in WITHOUT_CHANGES if name not in ("long-contexts", "slow-steps")])
def test_the_oracle_scores_100_percent(name):
    """But for the costs of changing the arm, which it does not avoid."""
    scene = Scene(WORLDS[name], 1, 4.0)
    assert play(follow(scene), scene).percent == pytest.approx(100.0, abs=4.0 if WORLDS[name].transition else 1.0)


def test_a_difference_weights_worlds_equally_and_has_a_paired_error():
    def runs(variant: str, **percents: list[float]) -> list[Run]:
        return [
            Run(world, seed, variant, percent, percent, percent, percent, 1, 0)
            for world, values in percents.items()
            for seed, percent in enumerate(values)
        ]

    before = runs("before", a=[90.0, 80.0, 70.0], b=[50.0, 60.0])
    after = runs("after", a=[91.0, 82.0, 73.0], b=[54.0, 64.0], c=[1.0])
    found = difference(after, before)
    assert found is not None
    assert found.mean == pytest.approx((2.0 + 4.0) / 2)
    assert found.stderr == pytest.approx((1 / 3) ** 0.5 / 2)
    assert difference(after, []) is None
