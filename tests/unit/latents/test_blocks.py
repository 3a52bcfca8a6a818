"""Who gets which unit: the table of blocks, over any plan (hypothesis). No Ray."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.latents.test_plan import bucket_plans, plans


@settings(max_examples=150, deadline=None)
@given(plans() | bucket_plans(), st.data())
def test_the_table_says_what_the_four_functions_say(plan, data):
    end = data.draw(st.integers(1, 3 * plan.steps_per_epoch))
    first, world = data.draw(st.integers(0, end - 1)), data.draw(st.integers(1, 5))
    units = np.arange(first * plan.units_per_step, end * plan.units_per_step)
    blocks, slots = plan.block_table(units, first)
    first_block = plan.block_of(first * plan.units_per_step)
    assert blocks.tolist() == [plan.block_of(unit) - first_block for unit in units.tolist()]
    firsts = np.array([plan.first_unit_of_block(unit) for unit in units.tolist()])
    assert np.array_equal(units - firsts, slots * plan.units_per_step)
    rows = [block for chunk in plan.chunk_range(first, end) for block in plan.blocks(chunk, first, end).tolist()]
    table = np.full((blocks.max() + 1, plan.block_steps), -1)
    table[blocks, slots] = units
    assert rows == table.tolist()
    for step in range(first, end):
        for rank in range(world):
            mine = units[(units // plan.units_per_step == step) & (blocks % world == rank)]
            assert mine.tolist() == list(plan.units_of_worker(step, first, rank, world))
    padding = max(-(blocks.max() + 1) % count for count in plan.worker_counts)
    assert padding == plan.padding_blocks(first, end)
