"""Who owns which matrix: decided once, when buckets are made, and the same on every rank."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from steadynorm.optim.buckets import Bucket, split
from steadynorm.optim.sharding.layout import Layout

Plan = tuple[tuple[slice, tuple[int, ...]], ...]  # chunks to exchange: which parameters, how many each rank owns


@dataclass(frozen=True)
class ShardedBucket(Bucket):
    """A bucket whose step moves data, with its plan."""

    plan: Plan = ()


def layout_in(bucket: Bucket) -> Layout:
    """Return the layout of a sharded bucket."""
    assert isinstance(bucket.shard, Layout)
    return bucket.shard


def needs_exchange(bucket: Bucket) -> bool:
    """Return whether a bucket's step moves data; if not, each rank runs the Rule on its shards."""
    if bucket.shard is None or bucket.arithmetic.split_rule is None or layout_in(bucket).group is None:
        return False
    return layout_in(bucket).replicated or not _is_separable(bucket)


def _is_separable(bucket: Bucket) -> bool:
    """Return whether a shard of the update is the update of the shard."""
    return bucket.arithmetic.is_elementwise or (bucket.row_separable and layout_in(bucket).keeps_rows_whole)


def plan_exchange(buckets: list[Bucket]) -> list[Bucket]:
    """Decide who owns which matrix, by greedy balance of cost over all buckets of a process group.

    Within each chunk, parameters are put in the order of their owners, the same on every rank.
    """
    loads: dict[Any, list[float]] = {}
    planned: dict[int, Bucket] = {}
    costs = {
        k: bucket.arithmetic.split_rule.cost(bucket.shape, bucket.settings)
        for k, bucket in enumerate(buckets)
        if bucket.arithmetic.split_rule is not None and needs_exchange(bucket)
    }
    for k in sorted(costs, key=lambda k: -costs[k]):
        bucket, layout = buckets[k], layout_in(buckets[k])
        is_owned = not _is_separable(bucket)
        load = loads.setdefault(layout.group, [0.0] * layout.ranks)
        params, plan = [], []
        for which in _chunks(bucket, layout):
            owners = []
            for p in bucket.params[which]:
                owner = load.index(min(load)) if is_owned else 0
                load[owner] += costs[k] if is_owned else 0.0
                owners.append((owner, len(owners), p))
            params += [p for _, _, p in sorted(owners, key=lambda entry: entry[:2])]
            counts = [sum(owner == rank for owner, _, _ in owners) for rank in range(layout.ranks)]
            plan.append((which, tuple(counts) if is_owned else ()))
        planned[k] = ShardedBucket(**{**vars(bucket), "params": params, "plan": tuple(plan)})
    return [planned.get(k, bucket) for k, bucket in enumerate(buckets)]


def _chunks(bucket: Bucket, layout: Layout) -> list[slice]:
    """Choose chunks so that each rank receives one ordinary chunk."""
    whole = dataclasses.replace(bucket, row_separable=False)
    together = next(iter(split(whole, len(bucket.params))))[0].stop * layout.ranks
    return [slice(low, min(low + together, len(bucket.params))) for low in range(0, len(bucket.params), together)]
