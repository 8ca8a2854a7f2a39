"""A trial of a hyper-parameter search: its parameters, reports, suspension and return."""
