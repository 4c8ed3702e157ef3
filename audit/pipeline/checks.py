"""What a configuration and its probes alone can tell to be wrong, before anything is captured."""

from __future__ import annotations

from collections.abc import Sequence

from audit._region_parse import nearest
from audit.errors import ConfigError
from audit.records import Region, Rule


def check_rules(rules: Sequence[Rule], regions: Sequence[Region]) -> None:
    """Refuse, before anything is captured, a rule on a region that neither file nor probes have.

    Raises
    ------
    ConfigError
        Naming the nearest region.

    Examples
    --------
    >>> check_rules([Rule("edges", "limit", fail=0.02)], [Region("edge", "box")])
    Traceback (most recent call last):
    audit.errors.ConfigError: rule 'limit shift edges': region 'edges' does not exist; did you mean 'edge'?
    """
    known = [*(region.name for region in regions), "*", "special", "first", "rest"]
    for rule in rules:
        if rule.region not in known:
            raise ConfigError(
                f"rule '{rule.label}': region '{rule.region}' does not exist{nearest(rule.region, known)}"
            )


def check_replicates(checkpoints: Sequence[tuple[str, str, str]]) -> None:
    """Refuse a replicate that is itself before or after: its distance would be no noise, or the shift.

    Parameters
    ----------
    checkpoints : sequence of (role, name, digest of the weights)

    Raises
    ------
    ConfigError
    """
    audited = {weights: (role, name) for role, name, weights in checkpoints if role in ("before", "after")}
    for role, name, weights in checkpoints:
        if role.startswith("replicate") and weights and weights in audited:
            twin, its_name = audited[weights]
            raise ConfigError(
                f"the replicate {name} has the weights of [checkpoints.{twin}] {its_name}; remove it from "
                "[[replicates]], or narrow the glob: a replicate is trained again with another seed"
            )
