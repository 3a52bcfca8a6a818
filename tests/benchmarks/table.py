"""Write the table of results into tests/benchmarks/README.md, from the JSON files that the benchmarks left.

python -m tests.benchmarks.table
"""

import json
import pathlib

from tests.benchmarks import record, resume_exactness

README = pathlib.Path(__file__).with_name("README.md")
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
LAST = "8c49ede"  # the commit before the scripts of some results were deleted


def machine(hardware):
    gpu = f", {hardware['gpu']}" if hardware["gpu"] else ""
    return f"{hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_gib']} GiB{gpu}"


def lines():
    """The table, a line for each thing that was measured; below it the machines, and exact resume."""
    found = [json.loads(path.read_text()) for path in sorted(record.folder().rglob("*.json"))]
    machines = list(dict.fromkeys(machine(result["hardware"]) for result in found))
    table = ["| what | measured | command | on, at revision |", "|---|---|---|---|"]
    for result in found:
        command, name = f"`{result['command']}`", result["command"].split()[2].rpartition(".")[2]
        if not (README.parent / f"{name}.py").exists():
            command += f", script at commit {LAST}"
        where = f"{machines.index(machine(result['hardware'])) + 1}, {result['revision']}"
        for what, measured in result["summary"].items():
            table.append(f"| {what} | {measured} | {command} | {where} |")
    table += ["", *(f"{number}. {name}" for number, name in enumerate(machines, start=1))]
    for result in found:
        if ".resume_exactness" in result["command"]:
            table += resume_exactness.table(result["details"]["rows"])
    return table


def main():
    before, _, rest = README.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{README} has no lines {BEGIN} and {END}.")
    README.write_text("\n".join([before + BEGIN, *lines(), END + after]))


if __name__ == "__main__":
    main()
