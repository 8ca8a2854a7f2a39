"""Many training jobs on one cluster in virtual time: what schedulers make of the same arrivals."""
