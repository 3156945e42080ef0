"""The controller's process: learning from reports (`learner`), commits (`journal`), and the calls around them.

The way of a report: `streams` reads its message. `learner` recognises repetitions, has `wire.ingest` check the report, and
lets it wait with its worker until it feeds the group to the estimator. `journal` keeps rows and marks, commits them, and
moves durable_seq once they are on disk. `streams` tells the worker.
"""
