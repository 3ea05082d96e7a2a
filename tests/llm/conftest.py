"""What makes the fake server's answers."""

import pytest


@pytest.fixture
def said(request):
    return request.getfixturevalue("answers").said


@pytest.fixture
def failed(request):
    return request.getfixturevalue("answers").failed
