"""Results of a sweep, kept: ``python -m studies kept sweeps/table4-small docs/results/table4-small.csv.gz``.

The other studies read such a file, or the sweep's folder, so that pages and plots are made again without training.
"""

import gzip
import zlib
from pathlib import Path

from fedpriv.core.errors import InputError
from fedpriv.core.runs import RunFolder
from fedpriv.sweep.folder import SweepFolder
from fedpriv.sweep.record import TrialRecord, from_csv, to_csv, to_table
from studies.arguments import StudyParser


def main() -> None:
    """Write the file; the same records give the same bytes."""
    parser = StudyParser("studies.kept", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--top-10", default="", metavar="DATA", help="data set whose accuracy is the top-10 one")
    with parser.parsed() as asked:
        records = records_of(asked.folder, asked.top_10)
        if not records:
            raise InputError(f"{asked.folder} has no trial that is over")
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_bytes(gzip.compress(to_csv(to_table(records)), mtime=0))


def records_of(path: Path, top_10: str = "") -> list[TrialRecord]:
    """Return the records of a sweep's folder or of a kept file."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_file():
        try:
            return from_csv(gzip.decompress(path.read_bytes()))
        except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"{path} is neither the folder of a sweep nor what is kept of one: {reason}") from error
    records = SweepFolder.open(path).records()
    if top_10 not in {record.data for record in records}:
        return records
    return [with_top_10(path, record) if record.data == top_10 else record for record in records]


def with_top_10(sweep: Path, record: TrialRecord) -> TrialRecord:
    """Put the final model's top-10 accuracy (the paper's for LFW), with Wilson's interval, in accuracy's place."""
    # Imported here: they take a second.
    import torch

    from fedpriv.attacks.intervals import rate_interval
    from fedpriv.core.finished import final_state, rebuilt_world

    if record.failed:
        return record
    folder = RunFolder.open(sweep / record.folder)
    world = rebuilt_world(folder, folder.experiment())
    final_state(folder, world, "evaluate").load_into(world.model)
    world.model.eval()
    labels = world.dataset.y_test
    with torch.no_grad():
        likely = world.model(world.network_input(world.dataset.x_test)).topk(10).indices.cpu()
    share = rate_interval(int((likely == labels[:, None]).sum()), len(labels))
    return record.model_copy(update={"accuracy": share.value, "accuracy_low": share.low, "accuracy_high": share.high})


def beside_noise(record: TrialRecord) -> set[str]:
    """Return the keys that a trial's sweep set, without those of the mechanism and the seed."""
    return {key for key in record.settings if not key.startswith("mechanism.")}


if __name__ == "__main__":
    main()
