"""From from_pretrained() to the first token, in a fresh process that has imported torch, transformers and penstock.

    python -m bench.model_start FOLDER --budget 8GiB [--cache-dir FOLDER] [--cache-length 2048] [--repeat 3] [--profile]

The first start of a model compiles it, and the clock runs: give --repeat 2 to see a later one. CUDA's context is made
inside the time. With --profile one more start is made under a profiler, which slows it down.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PROMPT_TOKENS = 64
_SHOWN_FUNCTIONS = 45


def start(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    import transformers

    import penstock
    from bench.suite.measure import synchronize

    # Both libraries load the greater part of themselves when asked.
    for library, name in ((transformers, "AutoModelForCausalLM"), (penstock, "from_pretrained")):
        getattr(library, name)
    profiler = cProfile.Profile() if options.profile else None
    if profiler is not None:
        profiler.enable()
    begun_s = time.perf_counter()
    model = penstock.from_pretrained(
        options.folder, options.budget, cache_length=options.cache_length, cache_dir=options.cache_dir, quiet=True
    )
    opened_s = time.perf_counter() - begun_s
    ids = torch.randint(3, 500, (1, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(1)).to(model.device)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
    synchronize(str(model.device))
    first_token_s = time.perf_counter() - begun_s
    if profiler is not None:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(_SHOWN_FUNCTIONS)
    found = {
        "weight_bytes": model.weight_bytes,
        "budget_bytes": model.budget_bytes,
        "open_s": opened_s,
        "first_token_s": first_token_s,
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    model.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--budget", required=True)
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--cache-length", type=int, default=2048)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(start(options)))
        return
    command = [sys.executable, "-m", "bench.model_start", "--child", *sys.argv[1:]]
    plain = [word for word in command if word != "--profile"]
    found = []
    for _ in range(options.repeat):
        done = subprocess.run(plain, stdout=subprocess.PIPE, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(f"open {found[-1]['open_s']:.2f} s, first token after {found[-1]['first_token_s']:.2f} s", flush=True)
    if options.profile:
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"starts": found}, indent=1))


if __name__ == "__main__":
    main()
