"""Who gets which unit: the table of blocks, over any plan (hypothesis). No Ray."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.latents.test_plan import bucket_plans, plans


@settings(max_examples=100, deadline=None)
@given(plans() | bucket_plans(), st.data())
def test_blocks_hold_each_unit_once_and_workers_share_them(plan, data):
    """Whatever the first step; a block holds units at the same position of consecutive steps of one epoch."""
    end = data.draw(st.integers(1, 3 * plan.steps_per_epoch))
    first, world = data.draw(st.integers(0, end - 1)), data.draw(st.integers(1, 5))
    units = np.array(plan.step_units(first, end))
    blocks, slots = plan.block_table(units, first)
    steps, positions = np.divmod(units, plan.units_per_step)
    assert set(blocks.tolist()) == set(range(blocks.max() + 1)) and slots.max() < plan.block_steps
    for block in range(blocks.max() + 1):
        mine = blocks == block
        assert len(set(positions[mine])) == 1 and len(set(steps[mine] // plan.steps_per_epoch)) == 1
        assert np.array_equal(steps[mine] - steps[mine][0], slots[mine] - slots[mine][0])
        assert (np.diff(slots[mine]) == 1).all()
    table = np.full((blocks.max() + 1, plan.block_steps), -1)
    table[blocks, slots] = units
    travelling = [block for chunk in plan.chunk_range(first, end) for block in plan.blocks(chunk, first, end).tolist()]
    assert travelling == table.tolist()
    for step in range(first, end):
        shares = [plan.units_of_worker(step, first, rank, world) for rank in range(world)]
        assert sorted(sum(shares, [])) == units[steps == step].tolist()
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert all((blocks[np.isin(units, mine)] % world == rank).all() for rank, mine in enumerate(shares))


@settings(max_examples=50, deadline=None)
@given(plans() | bucket_plans(), st.data())
def test_a_unit_shares_its_block_with_the_same_units_wherever_a_run_starts(plan, data):
    end = data.draw(st.integers(1, 3 * plan.steps_per_epoch))
    first = data.draw(st.integers(0, end - 1))
    units = plan.step_units(first, end)
    whole, whole_slots = plan.block_table(units, 0)
    tail, tail_slots = plan.block_table(units, first)
    assert np.array_equal(whole - whole[0], tail) and np.array_equal(whole_slots, tail_slots)
