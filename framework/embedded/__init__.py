"""An embedded Apache Mesos 1.11.0 on loopback."""
