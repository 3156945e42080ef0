"""The estimator. No I/O, no clock, no gRPC.

It learns acceptance and step times from reports and decides lengths.

    estimator = Estimator()                              # buckets="fine": one length per batch size up to 64
    estimator.add_context(key, limits)                   # a device with a pair of models; also to widen limits
    estimator.seed_profile(key, profile)                 # optional, a prior of limited weight
    outcome = estimator.observe(key, steps, worker_id)   # decisions that changed, and what drifted, in words
    estimator.table(key, worker_id)                      # best length by bucket; of a worker that is unlike others its own
    estimator.mix(key, worker_id).length_for(rows)       # the same for rows of several classes of requests
    estimator.take_probe(key, batch_size, worker_id=...) # at most one exploratory step, paid for; mostly None
    estimator.learned_rows(key)                          # what is believed, beside what was seen
    state = estimator.export_state(key)                  # plain values; restore() goes on bit for bit

Read in this order: acceptance.py (tokens of a step), times/ (its seconds: step_time.py, surface.py, then change.py and
speed.py), choice.py (which length, which probe), plans/ (where rows copy), contexts/ (learning.py and deciding.py, for
workers that are alike; workers.py and apart.py: who is), estimator.py (all contexts, what callers use).
docs/policy.md says why it is made so and what it is worth.
"""
