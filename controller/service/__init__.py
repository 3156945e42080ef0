"""The controller's process: reports in (`intake`), learning (`learner`), commits (`saving`), and the calls around them.

A report's way: `stream` reads its message, `intake` sorts out repetitions and lets `wire.ingest` check it; it waits with
its worker until `learner` gives the group to the estimator; `saving.journal` notes rows and marks, commits them, and moves
durable_seq when the disk has answered; `stream` tells the worker.
"""
