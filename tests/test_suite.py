"""What conftest.py says of the suite holds."""

from pathlib import Path

from conftest import LONG

TESTS = Path(__file__).parent


def test_what_is_long_is_there():
    assert {name for name in LONG if not list(TESTS.rglob(f"{name}.py"))} == set()
