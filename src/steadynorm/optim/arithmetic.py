"""What the step of a parameter group is made of."""

from typing import NamedTuple

from steadynorm.decay.hold import hold_of
from steadynorm.decay.rule import Group
from steadynorm.optim.batch import Rule, SplitRule

CHUNK_MIB = 256  # how much memory the temporaries of a chunk may take on an accelerator, unless a group says otherwise


class Arithmetic(NamedTuple):
    """The step of one group and the state it needs. An optimizer with groups of several kinds has one for each kind.

    Attributes:
        rule: The arithmetic of a step.
        state_keys: The keys of `SteadyOptimizer.fresh_state`.
        split_rule: The Rule in parts, where it needs whole parameters or takes a mesh.
        is_elementwise: Whether elements do not see each other, so that any shard can be updated by itself.
        normalizes: Whether an update has full size however small the momentum, and so must fade without gradients.
        counts_updates: Whether the Rule needs `Batch.counts`, which are kept in the state as `step`.
    """

    rule: Rule
    state_keys: tuple[str, ...]
    split_rule: SplitRule | None = None
    is_elementwise: bool = False
    normalizes: bool = False
    counts_updates: bool = False

    def chunk_elements(self, group: Group, row_separable: bool) -> int:
        """Return how many elements fit into a chunk on an accelerator, given what a step keeps per element at one time.

        A polar factor takes 8 bytes: the gradient, then the iteration in half precision, then the update twice. What more
        a setting takes is counted by `lab.launch_counter`, and tests/test_launches.py holds the budget.
        """
        size = 24 if self.counts_updates else 16 if row_separable else 8
        if group.get("nesterov") or group.get("momentum_dtype") or hold_of(group) != "decay":
            size += 4
        if group.get("cautious"):
            size += 12
        return int(group.get("chunk_mib", CHUNK_MIB) * 2**20) // size
