"""The estimator: learns step times and tokens per step of every arm, and selects arms. Pure numpy."""

from speclen.controller.estimator.estimator import Estimator, Outcome
from speclen.controller.estimator.estimators import Estimators
from speclen.controller.estimator.settings import EstimatorSettings

__all__ = ["Estimator", "EstimatorSettings", "Estimators", "Outcome"]
