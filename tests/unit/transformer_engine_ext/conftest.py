"""Uses one thread of torch in these tests, because several workers share the cores."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
