"""The self-test's report as text, and which of its checks show little.

Input: a report. Output: text. Owns: nothing.
"""

from __future__ import annotations

from typing import Any


def vacuous(report: dict[str, Any]) -> list[str]:
    """Return what the checks do not show on these ranks."""
    found = []
    if report["world_size"] == 1:
        found.append(
            "one rank: parity, bytes and timings are of collectives with itself; they show that the backend starts "
            "and takes the dtypes, not that ranks exchange anything"
        )
    if report["backend"] != "nccl":
        found.append(
            f"backend {report['backend']}: nothing is shown of NCCL, its streams, its communicators and their memory"
        )
    if report["device"] == "cpu":
        found.append("CPU: nothing is shown of GPU memory and kernels")
    if report["num_hosts"] == 1:
        found.append("one host: nothing is shown of links between hosts")
    refused = [check for check in report["checks"] if "refused" in check]
    found += [f"{check['name']} was refused, as it should be, and not run" for check in refused]
    return found


def render(report: dict[str, Any]) -> str:
    """Return the report as a table for people."""
    head = f"dkfac {report['dkfac']}, torch {report['torch']}, ranks: {report['world_size']}, hosts: "
    head += f"{report['num_hosts']}, {report['device']}, {report['backend']}" + (
        f" {report['nccl']}" if report["nccl"] else ""
    )
    width = max(len(check["name"]) for check in report["checks"])
    lines = [head, "", f"{'check':{width}}  result     value     limit  seconds"]
    for check in report["checks"]:
        result = "refused" if "refused" in check else "passed" if check["passed"] else "FAILED"
        lines.append(
            f"{check['name']:{width}}  {result:7} {check['value']:9.2g} {check['limit']:9.2g} {check['seconds']:8.2f}"
        )
        if "error" in check:
            lines.append(f"{'':{width}}  {check['error']}")
    sizes = sorted({timing["bytes"] for timing in report["timings"]})
    names = list(dict.fromkeys(timing["collective"] for timing in report["timings"]))
    seconds = {(t["collective"], t["bytes"]): t["seconds"] for t in report["timings"]}
    width = max(map(len, names))
    lines += ["", f"{'milliseconds':{width}}  " + "".join(f"{size / 1024:9.0f} KiB" for size in sizes)]
    lines += [f"{name:{width}}  " + "".join(f"{1e3 * seconds[name, size]:13.3f}" for size in sizes) for name in names]
    lines += ["", *(f"not shown: {text}" for text in report["vacuous"])]
    return "\n".join(lines)
