"""The estimator: learns step times and tokens per step of every arm, and selects arms. Pure numpy."""

from speclen.controller.estimator.estimator import Estimator, Estimators, Outcome
from speclen.controller.estimator.settings import EstimatorSettings

__all__ = ["Estimator", "EstimatorSettings", "Estimators", "Outcome"]
