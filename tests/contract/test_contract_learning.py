"""The controller's promises, kept towards simulated workers over gRPC."""

from collections.abc import Sequence

from tests.contract import protocol
from tests.contract.protocol import Control
from tests.contract.servers import as_json
from tests.contract.simulated import Played, SimulatedWorker
from tests.support.world import World


def mean_shortfall(world: World, history: Sequence[Played]) -> float:
    """Share of the oracle's goodput that the choices of a history lose."""
    return sum(world.shortfall(played.step.batch_size, played.choice) for played in history) / len(history)


def best_source(control: Control, batch_size: int) -> tuple[int, str]:
    """Length and source of the best row of a batch size."""
    [best] = [cell for cell in control.learned() if cell.is_best and cell.batch_min <= batch_size <= cell.batch_max]
    return best.length, best.source


def test_a_profile_seeds_and_never_overrides(controller):
    """By the profile drafting takes ten times as long as it does; that holds until steps were seen, and never again."""
    world, wrong = World(), World(draft_s=0.015)
    control = Control(controller.channel, "profiled", "profiled")
    control.register()
    assert control.import_profile(wrong.step_s, wrong.survival()) > 0
    for batch_size in (1, 4):
        length, source = best_source(control, batch_size)
        assert source == "profile"
        assert wrong.shortfall(batch_size, length) < 0.02
        assert world.shortfall(batch_size, length) > 0.3, "the profile must be wrong"
    worker = SimulatedWorker(controller.channel, "profiled", "profiled", world)
    for number in range(60):
        worker.play((1, 4)[number % 2], 40)
    assert mean_shortfall(world, worker.history[-400:]) < 0.02, "by the profile alone it would be over 0.5"
    control.import_profile(wrong.step_s, wrong.survival())
    for number in range(4):
        worker.play((1, 4)[number % 2], 40)
    worker.stream.close()
    assert mean_shortfall(world, worker.history[-160:]) < 0.02
    assert best_source(control, 4)[1] in ("online", "both")


def test_stored_reports_give_the_stored_decisions_again(learned):
    """Whatever else was reported to this controller: profiles, probes, repetitions and refused reports."""
    replayed = as_json("replay", "--db", str(learned), "--json")
    assert replayed["exact"], replayed
    assert replayed["num_reports"] >= 960
    assert replayed["num_stored"] == protocol.rows(learned, "SELECT count(*) FROM decision_history")[0][0]
    assert replayed["num_stored"] > 2
