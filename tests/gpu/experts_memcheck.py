"""Experts in slots, in runs, in groups and as a graph, at three budgets: what compute-sanitizer watches.

python -m tests.gpu.experts_memcheck make MODEL.pt2
compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.gpu.experts_memcheck play MODEL.pt2
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import penstock
from tests.experts.routed import Shape, compiled, routed, routing

# An expert is no whole number of tiles, and its rows are of 16 bytes and not of more.
SHAPE = Shape(layers=2, experts=24, top=4, hidden=264, inner=88, dtype=torch.bfloat16)
TOKENS = 12
PROMPT = 40


def play(path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(PROMPT, SHAPE.hidden, generator=generator).to("cuda", torch.bfloat16)
    ids = routing(SHAPE, PROMPT, stay=0.5, seed=1).cuda()
    prompt_ids = ids.transpose(0, 1).contiguous()

    def outputs(module: penstock.Module) -> list[torch.Tensor]:
        tokens = [module.run_method("decode", x[t : t + 1], ids[t].unsqueeze(1)) for t in range(TOKENS)]
        return [module.run_method("prefill", x, prompt_ids), *tokens]

    with penstock.Module(path, "64GiB") as module:
        wanted, full_bytes = outputs(module), module.full_bytes
    for part in (0.0, 0.5, 0.9):
        for cuda_graph in (False, True):
            with penstock.Module(path, "64GiB", cuda_graph=cuda_graph) as module:
                module.set_budget(max(module.floor_bytes, int(full_bytes * part)))
                assert all(torch.equal(one, other) for one, other in zip(outputs(module), wanted, strict=True))
                print(part, cuda_graph, [bank.slots for bank in module.plan.banks] if module.plan else [])
    print("memcheck run complete")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        compiled(routed(SHAPE), Path(sys.argv[2]), "cuda", prompt=PROMPT)
    else:
        play(Path(sys.argv[2]))
