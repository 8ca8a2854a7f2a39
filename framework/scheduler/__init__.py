"""One Mesos framework for many jobs: which job gets which offer, what is launched, what outlives us."""
