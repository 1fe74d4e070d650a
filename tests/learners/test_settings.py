"""Settings are checked where they are made, and say what is wrong with which."""

import pytest

from bmc_torchrl.learners.settings import (
    DQNSettings,
    ExpectedSarsaSettings,
    PublishedDQNSettings,
    RunSettings,
)

NAN, INF = float("nan"), float("inf")
GIVEN = {
    RunSettings: {"gamma": 0.9, "episodes": 3},
    ExpectedSarsaSettings: {"learning_rate": 0.5},
    PublishedDQNSettings: {
        "hidden": [4],
        "learning_rate": 0.1,
        "batch_size": 8,
        "capacity": 20,
        "epochs": 2,
    },
    DQNSettings: {},
}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (RunSettings, {"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1.5"),
        (RunSettings, {"episodes": 0}, "episodes must be an integer of at least 1, got 0"),
        (RunSettings, {"tests": -1}, "tests must be an integer of at least 0, got -1"),
        (RunSettings, {"seed": -1}, "seed must be an integer of at least 0, got -1"),
        (RunSettings, {"next_action": "now"}, "next_action must be 'before' or 'after', got 'now'"),
        (
            RunSettings,
            {"stop_after_perfect_tests": 0},
            "stop_after_perfect_tests must be an integer",
        ),
        (ExpectedSarsaSettings, {"learning_rate": 0}, r"learning_rate must be in \(0, 1\], got 0"),
        (
            ExpectedSarsaSettings,
            {"learning_rate": NAN},
            r"learning_rate must be in \(0, 1\], got nan",
        ),
        (ExpectedSarsaSettings, {"floor": -0.1}, r"floor must be in \[0, 1\], got -0.1"),
        (ExpectedSarsaSettings, {"decay": 1.5}, r"decay must be in \[0, 1\], got 1.5"),
        (ExpectedSarsaSettings, {"scale": INF}, "scale must be at least 0 and finite, got inf"),
        (
            ExpectedSarsaSettings,
            {"initializer": "ones"},
            "initializer='ones' is unknown; use zeros",
        ),
        (PublishedDQNSettings, {"capacity": 7}, "capacity=7 must hold a batch of batch_size=8"),
        (PublishedDQNSettings, {"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        (
            PublishedDQNSettings,
            {"learning_rate": INF},
            r"learning_rate must be in \(0, 1\], got inf",
        ),
        (PublishedDQNSettings, {"l2": NAN}, "l2 must be at least 0 and finite, got nan"),
        (PublishedDQNSettings, {"hidden": [8, 0]}, r"hidden must be widths .*got \[8, 0\]"),
        (DQNSettings, {"learning_rate": 0.0}, r"learning_rate must be in \(0, 1\], got 0.0"),
        (DQNSettings, {"learning_rate": 5.0}, r"learning_rate must be in \(0, 1\], got 5.0"),
        (DQNSettings, {"target_tau": NAN}, r"target_tau must be in \(0, 1\], got nan"),
        (DQNSettings, {"max_grad_norm": NAN}, "max_grad_norm must be positive or null, got nan"),
        (DQNSettings, {"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        (DQNSettings, {"batch_size": 2.5}, "batch_size must be an integer of at least 1, got 2.5"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_given(kind, change, message):
    with pytest.raises(ValueError, match=message):
        kind(**{**GIVEN[kind], **change})


@pytest.mark.parametrize("kind", GIVEN)
def test_settings_can_be_compared_and_looked_up(kind):
    assert len({kind(**GIVEN[kind]), kind(**GIVEN[kind])}) == 1
