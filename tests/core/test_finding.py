"""Findings are found by their folders, in one order, and each has its section of the report."""

from importlib import resources

from fedpriv.core.finding import Columns, Finding, findings


def test_each_has_a_rank_of_its_own_and_a_section_in_its_folder() -> None:
    every = findings()
    ranks = [finding.rank for finding in every]
    assert ranks == sorted(set(ranks))
    for finding in every:
        if type(finding).section is Finding.section:
            continue  # its sentences say all
        folder = resources.files(type(finding).__module__.rpartition(".")[0])
        assert '<section aria-labelledby="' in folder.joinpath("report.html").read_text(encoding="utf-8")


def test_columns_of_trials_have_defaults_and_no_name_twice() -> None:
    kinds = [finding.columns for finding in findings() if finding.columns is not None]
    names = [name for kind in kinds for name in kind.model_fields]
    assert len(names) == len(set(names))
    assert all(isinstance(kind(), Columns) and not kind().alarm for kind in kinds)
