"""One Mesos framework for many jobs: scheduling, offers, launches, durable state."""
