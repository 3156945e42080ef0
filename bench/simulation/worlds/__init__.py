"""Simulated workers whose numbers come from recordings on an H200.

A world is independent of the policy that plays it:

    world = VllmH200(seed=0, duration_s=120.0)     # or OwnH200
    score = play(world, learner)                   # learner: see `simulation.learner.Learner`
    score.percent(0.0, 40.0), score.percent(40.0)  # goodput, percent of the oracle
    play(VllmH200(0), Constant(Arm(3))).percent()  # any constant arm
    world.expected(batch_size, arm)                # true mean seconds and tokens per row

`python -m speclen.bench.simulation.scoreboard` prints the scores over seeds.
Modules: level.py (slow seconds), play.py (delivery of reports, scoring), vllm_h200.py, own_h200.py.
"""
