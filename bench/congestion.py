"""What programs that face the host cost those that read device memory: a picture, from the JSON of bench.kv_attention.

    python -m bench.congestion KV_ATTENTION_JSON OUT.svg

Both rates are of the same launches, by how many of its programs face the host. The dashed line is what device memory
gives the same launch when nothing lies far.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.kv_attention import POSITION_BYTES


def rates(stored: dict[str, Any]) -> list[tuple[int, float, float, float]]:
    """Programs, and bytes a second: of the far part, of the near one, and of the near one alone."""
    all_bytes = stored["batch"] * stored["length"] * POSITION_BYTES
    return [
        (
            row["programs"],
            row["host_bytes"] / row["seconds"],
            (all_bytes - row["host_bytes"]) / row["seconds"],
            (all_bytes - row["host_bytes"]) / row["near_alone_s"],
        )
        for row in stored["by_programs"]
    ]


def main() -> int:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    source, target = map(Path, sys.argv[1:])
    stored = json.loads(source.read_text())
    programs, far, near, alone = zip(*rates(stored), strict=True)
    figure, left = pyplot.subplots(figsize=(7, 4))
    right = left.twinx()
    left.plot(programs, [rate / 1e9 for rate in far], "o-", color="tab:blue", label="host memory")
    left.axhline(stored["link_bytes_per_s"] / 1e9, color="tab:blue", linestyle=":", label="link, copied")
    right.plot(programs, [rate / 1e9 for rate in near], "s-", color="tab:orange", label="device memory")
    right.plot(programs, [rate / 1e9 for rate in alone], "--", color="tab:orange", label="device memory, nothing far")
    left.set_xscale("log", base=2)
    left.set_xticks(programs, [str(count) for count in programs])
    left.set_xlabel("programs that face the host")
    left.set_ylabel("host memory, GB/s")
    right.set_ylabel("device memory, GB/s")
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    lines = [*left.get_lines(), *right.get_lines()]
    left.legend(lines, [str(line.get_label()) for line in lines], loc="lower right")
    left.set_title(f"{stored['environment']['gpu']}, {stored['length']} positions, {stored['share']:.0%} far")
    figure.tight_layout()
    # Without a date: the same figures make the same file.
    figure.savefig(target, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
