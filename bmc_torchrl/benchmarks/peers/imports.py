"""Processor time of importing a module, with all the names that it offers."""

from __future__ import annotations

import importlib
import time

import common

if __name__ == "__main__":
    parsed = common.arguments(name=str)
    began = time.process_time()
    module = importlib.import_module(parsed.name)
    for name in module.__all__:
        getattr(module, name)
    common.report(1, time.process_time() - began)
