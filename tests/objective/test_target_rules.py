"""An objective has one target network, hence one rule by which its weights follow the student's."""

import dataclasses

import pytest

from cdlm.methods import METHODS
from cdlm.objective import Network
from cdlm.process import masked
from cdlm.schedules import constant


def changed(target: Network) -> tuple:
    """The terms of mcdlm, and its first one again with another target."""
    first, anchor = METHODS["mcdlm"](masked(5)).terms
    return first, dataclasses.replace(first, name="again", target=target), anchor


def test_two_rules_are_an_error_that_shows_both() -> None:
    objective = METHODS["mcdlm"](masked(5))
    with pytest.raises(ValueError, match=r"lambda 0\.999\).*lambda 0\.5\)"):
        dataclasses.replace(objective, terms=changed(Network(constant(0.5))))


def test_targets_may_differ_in_how_they_are_sharpened() -> None:
    objective = METHODS["mcdlm"](masked(5))
    assert dataclasses.replace(objective, terms=changed(Network(temperature=0.5))).network == Network()


def test_one_rule_may_stand_twice() -> None:
    objective = METHODS["mcdlm"](masked(5))
    assert dataclasses.replace(objective, terms=changed(Network())).network == Network()
