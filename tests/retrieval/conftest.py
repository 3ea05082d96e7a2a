"""What tests of retrieval share."""

import threading

import pytest


@pytest.fixture
def running():
    """Starts servers and stops them; an address of each."""
    started = []

    def start(made) -> str:
        started.append(made)
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{made.server_port}"

    yield start
    for made in started:
        made.shutdown()
        made.server_close()
