"""The controller's process: reports in (`intake`), learning (`learner`), commits (`journal`), and the calls around them.

The way of a report: `streams` reads its message. `intake` recognises repetitions and has `wire.ingest` check it. It waits
with its worker until `learner` feeds the group to the estimator. `journal` keeps rows and marks, commits them, and moves
durable_seq once they are on disk. `streams` tells the worker.
"""
