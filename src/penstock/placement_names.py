"""The values of `placement=`, for the planner, the runtime and the command line alike."""

# What happens to weights that do not fit into the budget. They are: copied or read in place, whichever suits; copied;
# read in place; or read in place except for their first rows, if a kernel can. The planner knows these.
PLANNED = ("auto", "stream", "in-place", "split")
# For comparison, one without a plan: evicts the least recently used weight.
PLACEMENTS = (*PLANNED, "lru")
