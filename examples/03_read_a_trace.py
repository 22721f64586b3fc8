"""Which experts a text used, from the trace of a run."""

import collections
import json
import sys
import tempfile
from pathlib import Path

from twoends.cli.main import main as twoends_command


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        sys.argv = ["twoends", "run", "The sea was", "-n", "20", "--trace", str(trace), "--json"]
        if twoends_command():
            raise SystemExit("the run failed")
        events = [json.loads(line) for line in trace.read_text().splitlines()]
    uses = collections.Counter(
        (event["layer"], expert)
        for event in events
        if event["event"] == "route"
        for row in event["ids"]
        for expert in row
    )
    for (layer, expert), count in uses.most_common(10):
        print(f"layer {layer}  expert {expert:3d}  {count:3d} times")


if __name__ == "__main__":
    main()
