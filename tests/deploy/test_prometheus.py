"""deploy/prometheus: the rules are well-formed, and name metrics that there are."""

import re
from typing import Any

import yaml  # type: ignore[import-untyped]  # it has no types
from tests.deploy.fresh import ROOT

from tiergate.observe.metrics import Metrics

RULES = ROOT / "deploy" / "prometheus" / "tiergate.rules.yaml"


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def test_rules_name_declared_metrics_only() -> None:
    named = {name for rule in rules() for name in re.findall(r"tiergate_\w+", rule["expr"])}
    assert named
    assert named - set(Metrics().declared) == set()


def test_rules_are_alerts_that_say_what_is_wrong() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert re.fullmatch(r"\d+m", rule.get("for", "1m"))
