"""`tests/field_bugs.md` names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_named_in_the_map_exists() -> None:
    text = (TESTS / "field_bugs.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    defined = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 50
    assert not named - defined
    for path in re.findall(r"`(unit/test_\w+\.py)`", text):
        assert (TESTS / path).is_file(), path
