"""Named scenarios and error measures: what the tests and `regard verify` run, for anyone to use.

`for scenario in SCENARIOS: print(check(scenario, "cuda", torch.bfloat16))` says in a line each how far
every result and gradient is from the reference.
"""

from regard.testing.catalogue import SCENARIOS
from regard.testing.checks import Result, check, reason_to_skip
from regard.testing.draw import KINDS
from regard.testing.instruments import Arena, poisoned
from regard.testing.scenarios import Case, Scenario

__all__ = ["KINDS", "SCENARIOS", "Arena", "Case", "Result", "Scenario", "check", "poisoned", "reason_to_skip"]
