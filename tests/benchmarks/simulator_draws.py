"""Seconds that simulated draws of the full Stable Diffusion 2 run take, and what they say.

    python -m tests.benchmarks.simulator_draws [--draws 100] [--gpus 32 128]

Without spot machines, and on spot machines of which each is reclaimed every second day, where the run may shrink to
half. One process, one thread.
"""

import argparse
import time

from helpers.lesson import planner, simulator
from tests.benchmarks import record


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--gpus", type=int, nargs="+", default=[32, 128])
    given = parser.parse_args()
    spot = {"spot_discount": 0.6, "faults": planner.Faults(reclaims_per_day=0.5)}
    summary, tables = {}, {}
    for gpus in given.gpus:
        for name, options in (("on demand", {}), ("spot", {**spot, "least_gpus": gpus // 2})):
            stages = simulator.sd2_run(gpus, **options)
            started = time.perf_counter()
            runs = simulator.simulate(stages, given.draws)
            seconds, table = time.perf_counter() - started, simulator.summarize(runs)
            print(f"{gpus} GPUs, {name}: {given.draws} draws in {seconds:.1f} s")
            print(table.round(1).to_string(), flush=True)
            low, middle, high = table["hours"].iloc[:3]
            summary[f"{given.draws} draws of the full run, {gpus} A100s, {name}"] = (
                f"{seconds:.1f} s; {low:,.0f} to {high:,.0f} hours in 80 % of them, ${table['dollars'].iloc[1]:,.0f}"
            )
            tables[f"{gpus}, {name}"] = {"seconds": seconds, **table.to_dict()}
    record.write("simulator_draws", summary, tables=tables)


if __name__ == "__main__":
    main()
