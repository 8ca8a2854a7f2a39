"""A private Apache Mesos 1.11.0 on loopback, for those who have no cluster at hand."""
