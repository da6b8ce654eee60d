"""The version, in one place: pyproject.toml and CHANGELOG.md follow it (tests/test_package.py)."""

__version__ = "0.1.0"
