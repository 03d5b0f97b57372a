"""Run one experiment from its settings to its summary: train, account, attack, score, write the files."""

from fedpriv.core.lab.attack_again import attack_command, attack_run
from fedpriv.core.lab.run import Engine, check_experiment, resume_run, start_run
from fedpriv.core.lab.tune import Tuning, tune_attack
from fedpriv.core.records import Summary

__all__ = [
    "Engine",
    "Summary",
    "Tuning",
    "attack_command",
    "attack_run",
    "check_experiment",
    "resume_run",
    "start_run",
    "tune_attack",
]
