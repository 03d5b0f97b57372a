"""Many runs as one study: what a sweep file asks for, what each trial gave, and the folder that keeps both.

file.py reads the file into trials (trial.py), record.py reads a run's folder into one record, table.py writes records
as Parquet and CSV, folder.py is what lies where. Who runs the trials is in :mod:`fedpriv.sweep.run`.
"""
