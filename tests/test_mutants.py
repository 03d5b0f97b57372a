"""The table of seeded bugs can be made at any time: what each bug changes is in the tree, once."""

from tests.mutants import HOME, MUTANTS


def test_each_bug_has_its_place() -> None:
    places = {each.bug: (HOME / each.file).read_text(encoding="utf-8").count(each.before) for each in MUTANTS}
    assert {bug: count for bug, count in places.items() if count != 1} == {}
