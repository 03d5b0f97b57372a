"""Many runs as one study: what a sweep file asks for, what each trial gave, and the folder that keeps both.

file.py reads the file into trials (trial.py), record.py reads a run's folder into one record, table.py writes records
as Parquet and CSV, folder.py is what lies where. Who runs the trials is in :mod:`fedpriv.core.lab.sweep`.
"""

from fedpriv.sweep.file import AuditConfig, ResourcesConfig, Sweep, load_sweep
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.progress import SweepProgress
from fedpriv.sweep.record import Reconstruction, TrialRecord, read_record
from fedpriv.sweep.table import describe_columns, to_table
from fedpriv.sweep.trial import Trial

__all__ = [
    "AuditConfig",
    "Reconstruction",
    "ResourcesConfig",
    "Sweep",
    "SweepFolder",
    "SweepProgress",
    "Trial",
    "TrialRecord",
    "describe_columns",
    "load_sweep",
    "read_record",
    "to_table",
]
