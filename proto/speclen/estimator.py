"""The estimator as a library: it learns from the steps of any serving loop, and needs numpy and pydantic alone."""

from speclen.controller.estimator import Estimator, EstimatorSettings, Outcome
from speclen.records import (
    Arm,
    Limits,
    OutputEvaluation,
    Probe,
    Profile,
    ProfileCell,
    RequestClass,
    StepFlag,
    StepRecord,
)

__all__ = [
    "Arm",
    "Estimator",
    "EstimatorSettings",
    "Limits",
    "Outcome",
    "OutputEvaluation",
    "Probe",
    "Profile",
    "ProfileCell",
    "RequestClass",
    "StepFlag",
    "StepRecord",
]
