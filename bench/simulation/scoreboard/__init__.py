"""Scores of an estimator in all simulated worlds: `python -m speclen.bench.simulation.scoreboard`.

Every part is written to the file as soon as it is played, and parts that stand there are not played again: interrupt it at
will. Parts: the worlds made from recordings (worlds/), the scenarios of `bench policy`, and the cost of a
report with --cost, which wants a machine that is otherwise quiet.
"""
