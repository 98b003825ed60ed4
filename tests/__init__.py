"""Tests, in the folders of what they test; helpers in tests/support."""

import pytest

pytest.register_assert_rewrite("tests.support")
