"""The trial side of a hyper-parameter search: parameters, reports, checkpoints, suspension and resumption."""
