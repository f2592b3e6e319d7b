"""The table of planted faults fits the code. `make planted` plants them."""

from faults import faults
from runs import REPOSITORY


def test_a_file_has_each_piece_once_and_its_tests_are_there():
    for file, tests, piece, other in faults():
        text = (REPOSITORY / file).read_text(encoding="utf-8")
        assert text.count(piece) == 1, (file, piece)
        if file.endswith(".py"):
            compile(text.replace(piece, other), file, "exec")
        for name, _, test in (test.partition("::") for test in tests):
            text = (REPOSITORY / "tests" / name).read_text(encoding="utf-8")
            assert not test or f"\ndef {test.partition('[')[0]}(" in text, test


def test_a_hundred_faults_over_all_rooms():
    files = [fault.file for fault in faults()]
    rooms = {file.rpartition("/")[0].removeprefix("preference_recipes/") for file in files}
    assert rooms == {"recipes", "common", "data", "models", "rollouts", "tools", "forks"}
    assert len(files) >= 100
