"""A schedule, executed: one jaxpr of the loss, cut at its stack, run in stages."""
