import importlib
import logging
import os
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

with warnings.catch_warnings():
    # TorchRL's collectors warn about themselves when first imported.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torchrl.collectors  # noqa: F401

torch.set_num_threads(1)

# What configures logging closes the handlers there are, and absl's (bsuite imports it) would close
# the stream that pytest captures with.
absl_logging = importlib.import_module("absl.logging") if find_spec("absl") else None
if absl_logging is not None:
    absl_logging.PythonHandler.close = logging.Handler.close


def pytest_addoption(parser):
    parser.addoption(
        "--published",
        default=os.environ.get("BMC_PUBLISHED"),
        metavar="FOLDER",
        help="folder with the authors' workbooks, grid_sarsa.xlsx and so on (or BMC_PUBLISHED)",
    )


@pytest.fixture
def published(pytestconfig):
    """The folder with the authors' workbooks; docs/protocol.md says where to get them."""
    folder = pytestconfig.getoption("published")
    if not folder:
        pytest.skip("needs the authors' workbooks: pytest --published FOLDER, or BMC_PUBLISHED")
    return Path(folder)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def random():
    return torch.Generator().manual_seed(5)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
