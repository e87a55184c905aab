"""The values of `placement=`, for the planner, the runtime and the command line alike."""

# What does not fit into the budget is: copied or read in place, whichever suits it; copied; read in place; or read in
# place but for its first rows, where a kernel can. The planner knows these.
PLANNED = ("auto", "stream", "in-place", "split")
# And without a plan: the least recently used goes, for comparison.
PLACEMENTS = (*PLANNED, "lru")
