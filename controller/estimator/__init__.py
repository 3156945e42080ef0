"""The estimator: learns step times and tokens per step of every arm, and selects arms. Pure numpy."""

from speclen.controller.estimator.contexts import Contexts
from speclen.controller.estimator.estimator import Estimator, Outcome
from speclen.controller.estimator.settings import EstimatorSettings

__all__ = ["Contexts", "Estimator", "EstimatorSettings", "Outcome"]
